// What a screen reader is told: few sentences, and never token by token.
import { html } from "./html.js";
import { Store, useStore } from "./store.js";

const told = new Store("");

/** Says a sentence politely; the same one twice is said twice. */
export function say(sentence) {
  told.set(told.value === sentence ? `${sentence}\u00a0` : sentence);
}

export function Live() {
  return html`<div class="unseen" role="status" aria-live="polite">${useStore(told)}</div>`;
}
