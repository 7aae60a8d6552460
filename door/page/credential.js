// The reader's credential, in memory alone and gone with the page; and the form that asks for it.
import { Dialog } from "./dialog.js";
import { html, useState } from "./html.js";
import { Store, useStore } from "./store.js";

class Credential {
  /** What the form shows: whether it is asked for, and whether the last one was refused. */
  store = new Store({ isAsked: false, isRefused: false, has: false });
  secret = "";
  /** How often one was given. */
  given = new Store(0);

  /** A call was refused with `used`. Whether there is another one by now: the reader may give one, or decline. */
  async another(used, signal) {
    if (this.secret !== used) return true;
    const before = this.given.value;
    this.store.set({ isAsked: true, isRefused: used !== "", has: used !== "" });
    await this.store.until(({ isAsked }) => !isAsked, signal);
    return this.given.value !== before;
  }

  give(secret) {
    this.secret = secret;
    this.given.value += 1; // before whoever waits for it looks
    this.store.set({ isAsked: false, isRefused: false, has: true });
    this.given.set(this.given.value);
  }

  ask() {
    this.store.patch({ isAsked: true, isRefused: false });
  }

  decline() {
    // one that was refused is of no use any more
    if (this.store.value.isRefused) this.secret = "";
    this.store.set({ isAsked: false, isRefused: false, has: this.secret !== "" });
  }
}

export const credential = new Credential();

export function CredentialForm() {
  const { isAsked, isRefused } = useStore(credential.store);
  const [secret, setSecret] = useState("");
  if (!isAsked) return null;
  const give = () => {
    if (!secret.trim()) return;
    credential.give(secret.trim());
    setSecret("");
  };
  return html`<${Dialog} title="Who is reading?" onClose=${() => credential.decline()} onSubmit=${give}>
    ${isRefused
      ? html`<p class="trouble" role="alert">The service refused this credential. Check it, and give it again.</p>`
      : html`<p>This service asks for a credential. Give the one that its operator told you.</p>`}
    <label class="field">Credential
      <input type="password" autocomplete="off" spellcheck=${false} autofocus value=${secret}
        aria-invalid=${isRefused ? "true" : null} onInput=${(event) => setSecret(event.currentTarget.value)} />
    </label>
    <p class="quiet">It stays in the memory of this tab, and is gone when the page is reloaded or closed.</p>
    <div class="choices">
      <button type="button" onClick=${() => credential.decline()}>Not now</button>
      <button type="submit" class="main" disabled=${!secret.trim()}>Go on</button>
    </div>
  <//>`;
}

/** In the header: whether calls bear a credential, and a way to change that. */
export function CredentialButton({ isLocked }) {
  const { has } = useStore(credential.store);
  if (isLocked && !has) return html`<button onClick=${() => credential.ask()}>Give a credential</button>`;
  return has ? html`<button class="plain" onClick=${() => credential.ask()}>Change credential</button>` : null;
}
