// The user's credential, which is kept only in memory, and the form that asks for it.
import { Dialog } from "./dialog.js";
import { html, useState } from "./html.js";
import { Store, useStore } from "./store.js";

class Credential {
  /** State of the form: whether it is open, and whether the last credential was refused. */
  store = new Store({ isAsked: false, isRefused: false, has: false });
  secret = "";
  /** Number of credentials entered. */
  given = new Store(0);

  /** Called after a refusal of `used`. Resolves to whether there is another credential: the user may decline. */
  async another(used, signal) {
    if (this.secret !== used) return true;
    const before = this.given.value;
    this.store.set({ isAsked: true, isRefused: used !== "", has: used !== "" });
    await this.store.until(({ isAsked }) => !isAsked, signal);
    return this.given.value !== before;
  }

  give(secret) {
    this.secret = secret;
    this.given.value += 1; // before the waiting calls check it
    this.store.set({ isAsked: false, isRefused: false, has: true });
    this.given.set(this.given.value);
  }

  ask() {
    this.store.patch({ isAsked: true, isRefused: false });
  }

  decline() {
    // a refused credential is useless
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
  return html`<${Dialog} title="Credential required" onClose=${() => credential.decline()} onSubmit=${give}>
    ${isRefused
      ? html`<p class="trouble" role="alert">The service refused this credential. Check it and try again.</p>`
      : html`<p>Enter the credential that you received from the operator of this service.</p>`}
    <label class="field">Credential
      <input type="password" autocomplete="off" spellcheck=${false} autofocus value=${secret}
        aria-invalid=${isRefused ? "true" : null} onInput=${(event) => setSecret(event.currentTarget.value)} />
    </label>
    <p class="quiet">It is kept only in the memory of this tab, until the page is reloaded or closed.</p>
    <div class="choices">
      <button type="button" onClick=${() => credential.decline()}>Not now</button>
      <button type="submit" class="main" disabled=${!secret.trim()}>Continue</button>
    </div>
  <//>`;
}

/** Button of the header that enters or changes the credential. */
export function CredentialButton({ isLocked }) {
  const { has } = useStore(credential.store);
  if (isLocked && !has) return html`<button onClick=${() => credential.ask()}>Enter a credential</button>`;
  return has ? html`<button class="plain" onClick=${() => credential.ask()}>Change credential</button>` : null;
}
