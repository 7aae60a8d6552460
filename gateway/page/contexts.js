// The contexts that the user may see. The page calls them documents.
import { listContexts } from "./api.js";
import { credential } from "./credential.js";
import { service } from "./service.js";
import { Store } from "./store.js";

const PAUSE = 1000;

class Contexts {
  /** `list` is null until it is loaded; newest first. */
  store = new Store({ list: null, error: null });
  #timer = null;
  #last = -PAUSE;
  #running = false;
  #again = false;

  constructor() {
    // the contexts may have changed, or the connection is back
    service.store.follow(({ link }) => link === "live" && this.refresh());
    // another credential sees other contexts
    credential.given.follow(() => this.store.set({ list: null, error: null }));
  }

  get ids() {
    return new Set((this.store.value.list ?? []).map(({ id }) => id));
  }

  find(id) {
    return this.store.value.list?.find((context) => context.id === id);
  }

  /** Reloads the list, at most once a second; calls in between are combined. */
  refresh() {
    if (this.#running) this.#again = true;
    else this.#timer ??= setTimeout(() => this.#load(), Math.max(0, this.#last + PAUSE - performance.now()));
  }

  /** Stores one context as returned by a call; null: it was deleted. */
  put(id, context) {
    const others = (this.store.value.list ?? []).filter((each) => each.id !== id);
    this.#set(context ? [...others, context] : others);
    if (this.#running) this.#again = true; // its response may be older
  }

  async #load() {
    this.#timer = null;
    this.#last = performance.now();
    this.#running = true;
    try {
      this.#set(await listContexts());
    } catch (error) {
      this.store.patch({ error });
    }
    this.#running = false;
    if (this.#again) {
      this.#again = false;
      this.refresh();
    }
  }

  #set(list) {
    this.store.set({ list: [...list].sort((a, b) => b.created - a.created), error: null });
  }
}

export const contexts = new Contexts();
export const titleOf = ({ id, display_name: title }) => title || id;
