// The contexts that the reader may see. On the page they are called documents, which is what readers put in.
import { listContexts } from "./api.js";
import { credential } from "./credential.js";
import { service } from "./service.js";
import { Store } from "./store.js";

const PAUSE = 1000;

class Contexts {
  /** `list` is null until the service told; newest first. */
  store = new Store({ list: null, error: null });
  #timer = null;
  #last = -PAUSE;
  #running = false;
  #again = false;

  constructor() {
    // what the cluster holds has changed, or the service was found again
    service.store.follow(({ link }) => link === "live" && this.refresh());
    // what one reader may see is not for another
    credential.given.follow(() => this.store.set({ list: null, error: null }));
  }

  get ids() {
    return new Set((this.store.value.list ?? []).map(({ id }) => id));
  }

  find(id) {
    return this.store.value.list?.find((context) => context.id === id);
  }

  /** Asks at most once a second, for all that want it meanwhile. */
  refresh() {
    if (this.#running) this.#again = true;
    else this.#timer ??= setTimeout(() => this.#load(), Math.max(0, this.#last + PAUSE - performance.now()));
  }

  /** What a call said of one context; null: it is gone. */
  put(id, context) {
    const others = (this.store.value.list ?? []).filter((each) => each.id !== id);
    this.#set(context ? [...others, context] : others);
    if (this.#running) this.#again = true; // its answer may be older than this
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
