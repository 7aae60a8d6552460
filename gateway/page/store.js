// An observable value, for state that several components share.
import { useLayoutEffect, useState } from "./html.js";

export class Store {
  #followers = new Set();

  constructor(value) {
    this.value = value;
  }

  set(value) {
    this.value = value;
    for (const follower of [...this.#followers]) follower(value);
  }

  /** Changes some fields of a value that is an object. */
  patch(fields) {
    this.set({ ...this.value, ...fields });
  }

  follow(follower) {
    this.#followers.add(follower);
    return () => this.#followers.delete(follower);
  }

  /** Resolves with the current or the next value that fulfils the condition. */
  until(condition, signal) {
    return new Promise((resolve, reject) => {
      const end = (settle, value) => {
        unfollow();
        signal?.removeEventListener("abort", abort);
        settle(value);
      };
      const abort = () => end(reject, signal.reason);
      const unfollow = this.follow((value) => condition(value) && end(resolve, value));
      signal?.addEventListener("abort", abort);
      if (signal?.aborted) abort();
      else if (condition(this.value)) end(resolve, this.value);
    });
  }
}

export function useStore(store) {
  const [, setSeen] = useState({});
  // before the browser paints, so that no change after rendering is missed
  useLayoutEffect(() => {
    const seen = store.value;
    const unfollow = store.follow(() => setSeen({}));
    if (store.value !== seen) setSeen({});
    return unfollow;
  }, [store]);
  return store.value;
}
