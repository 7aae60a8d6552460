// The connection to the service, and the live state of the cluster.
import { say } from "./announcer.js";
import { watchCluster } from "./api.js";
import { credential } from "./credential.js";
import { isAbort, Refusal, refusalOf, Unreachable } from "./errors.js";
import { eventsOf } from "./sse.js";
import { Store } from "./store.js";

const LONGEST_PAUSE = 8;
// A stream without data for so many seconds counts as dead: the gateway sends a comment every 10 s.
const SILENCE = 35;
const ANOTHER = new Error("the credential changed");
// The packaged model, which only looks up facts and cannot chat.
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

  /** Whether the model can answer without a document. */
  get chats() {
    return !!this.store.value.cluster?.model.has_chat_template && !this.looksUp;
  }

  /** The largest number of tokens of a document with a question and its answer; Infinity if unknown. */
  get longest() {
    const { model, workers } = this.store.value.cluster ?? { model: {}, workers: [] };
    const trained = model.is_long_allowed ? 0 : model.max_context_tokens;
    const room = workers.reduce((sum, { max_tokens }) => sum + max_tokens, 0);
    return Math.min(trained || Infinity, room || Infinity);
  }

  /** Follows the cluster until the page is closed. */
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

  /** Retries immediately. */
  retry() {
    this.#wake();
  }

  async #follow(found) {
    const silence = new AbortController();
    // the view depends on the credential
    const unfollow = credential.given.follow(() => silence.abort(ANOTHER));
    let timer;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE * 1000);
    };
    try {
      // the timeout starts with the stream, because the user may enter a credential before
      const response = await watchCluster(silence.signal);
      heard();
      for await (const { type, data } of eventsOf(response)) {
        heard();
        if (type === "error") throw refusalOf(JSON.parse(data).error);
        if (type !== "message") continue;
        if (this.store.value.link === "lost") say("Connected to the service again.");
        found();
        this.store.set({ link: "live", cluster: JSON.parse(data), error: null, retryAt: null });
      }
    } catch (error) {
      if (silence.signal.reason === ANOTHER) return;
      throw isAbort(error) ? new Unreachable("the stream timed out") : error;
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
