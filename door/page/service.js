// Whether the service is there, and what the cluster says of itself, live.
import { watchCluster } from "./api.js";
import { credential } from "./credential.js";
import { isAbort, Refusal, refusalOf, Unreachable } from "./errors.js";
import { say } from "./live.js";
import { eventsOf } from "./sse.js";
import { Store } from "./store.js";

const LONGEST_PAUSE = 8;
// A stream that says nothing for so long is taken for dead: the door sends a comment every 10 s.
const SILENCE = 35;
const ANOTHER = new Error("another credential was given");
// The model in the package: it looks facts up, and is asked single questions only.
const LOOKS_UP = "lookup";

class Service {
  /** `link`: "opening", "live", "lost" or "locked" (no credential); `retryAt` is the time of the next try, in ms. */
  store = new Store({ link: "opening", cluster: null, error: null, retryAt: null });
  #wake = () => {};

  get isLive() {
    return this.store.value.link === "live";
  }

  get model() {
    return this.store.value.cluster?.model.name;
  }

  get looksUp() {
    return this.model === LOOKS_UP;
  }

  /** Follows the cluster for as long as the page lives. */
  async watch() {
    addEventListener("online", () => this.retry());
    document.addEventListener("visibilitychange", () => document.hidden || this.retry());
    for (let failures = 0; ; ) {
      try {
        await this.#follow(() => (failures = 0));
      } catch (error) {
        if (error instanceof Refusal && error.status === 401) await this.#locked(error);
        else await this.#lost(error, (failures += 1));
      }
    }
  }

  /** Tries again now, not when it is time. */
  retry() {
    this.#wake();
  }

  async #follow(found) {
    const silence = new AbortController();
    // another reader sees another cluster
    const unfollow = credential.given.follow(() => silence.abort(ANOTHER));
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE * 1000);
    };
    try {
      // waiting for a credential is no silence: the time runs once the stream is there
      const response = await watchCluster(silence.signal);
      heard();
      for await (const { type, data } of eventsOf(response)) {
        heard();
        if (type === "error") throw refusalOf(JSON.parse(data).error);
        if (type !== "message") continue;
        if (this.store.value.link === "lost") say("The service is there again.");
        found();
        this.store.set({ link: "live", cluster: JSON.parse(data), error: null, retryAt: null });
      }
    } catch (error) {
      if (silence.signal.reason === ANOTHER) return;
      throw isAbort(error) ? new Unreachable("it fell silent") : error;
    } finally {
      unfollow();
      clearTimeout(timer);
    }
    throw new Unreachable("the stream ended");
  }

  async #locked(error) {
    this.store.patch({ link: "locked", error, retryAt: null });
    await credential.store.until(({ has, isAsked }) => has && !isAsked);
  }

  async #lost(error, failures) {
    const wait = Math.max(Math.min(2 ** (failures - 1), LONGEST_PAUSE), Math.min(error.retryAfter ?? 0, LONGEST_PAUSE));
    const first = this.store.value.link !== "lost";
    this.store.patch({ link: "lost", error, retryAt: Date.now() + wait * 1000 });
    if (first) say("The service cannot be reached. The page keeps trying.");
    await new Promise((resolve) => {
      this.#wake = resolve;
      setTimeout(resolve, wait * 1000);
    });
    this.#wake = () => {};
  }
}

export const service = new Service();
