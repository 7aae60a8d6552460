// Announcements for screen readers: few sentences, and never single tokens.
import { html } from "./html.js";
import { Store, useStore } from "./store.js";

const sentences = new Store("");

/** Announces a sentence. A repeated sentence is announced again. */
export function say(sentence) {
  sentences.set(sentences.value === sentence ? `${sentence}\u00a0` : sentence);
}

export function Live() {
  return html`<div class="unseen" role="status" aria-live="polite">${useStore(sentences)}</div>`;
}
