// The reader's credential: in memory alone, and gone with the page.
import { Store } from "./store.js";

class Credential {
  /** What the form shows: whether it is asked for, and whether the last one was refused. */
  store = new Store({ isAsked: false, isRefused: false, has: false });
  secret = "";

  /** A call was refused with `used`. Whether there is another one by now: the reader may give one, or decline. */
  async another(used, signal) {
    if (this.secret !== used) return true;
    this.store.set({ isAsked: true, isRefused: used !== "", has: used !== "" });
    await this.store.until(({ isAsked }) => !isAsked, signal);
    return this.secret !== used;
  }

  give(secret) {
    this.secret = secret;
    this.store.set({ isAsked: false, isRefused: false, has: secret !== "" });
  }

  ask() {
    this.store.patch({ isAsked: true, isRefused: false });
  }

  decline() {
    this.store.patch({ isAsked: false });
  }
}

export const credential = new Credential();
