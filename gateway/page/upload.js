// One upload: sent in parts from the offset of the service, so that an interruption costs at most one part.
import { lookAtUpload, sendPart, sendWhole } from "./api.js";
import { isAbort, passes, Refusal, refusalOf, Unreachable } from "./errors.js";
import { service } from "./service.js";
import { eventsOf } from "./sse.js";
import { Store } from "./store.js";

const SMALLEST = 64 * 1024;
const LARGEST = 8 * 1024 * 1024;
// Target duration of a part in seconds, because progress is counted in parts.
const SECONDS = 1;
const LONGEST_PAUSE = 15;
const NOTHING = { received: 0, receivedTokens: 0, processed: 0, total: 0, rate: 0, byteRate: 0 };

/** `what` is {id, uploadId, append, title, fileName, size, type}; `file` may be missing after a reload. A file with a
 * `type`, or a folder, is sent whole, and the gateway extracts its text.
 *
 * Its `store` has the phase: "queued", "sending", "extracting" (and `place`), "reading", "recovering", "waiting" (and `until`), "file" (choose it
 * again), "failed" (and `error`), "stopping", "done" (and `context`); `leftOut` with files without text and the reasons, and `numUnlisted`, the number of
 * further ones; and the numbers of NOTHING. */
export class Upload {
  #abort = new AbortController();
  #offset = null;
  #part = SMALLEST;
  #sent;

  constructor(what, file = null, { isNew = false } = {}) {
    this.what = what;
    if (isNew) this.#offset = 0;
    this.file = file;
    this.store = new Store({ phase: "queued", error: null, until: null, context: null, place: "", leftOut: [], numUnlisted: 0, ...NOTHING });
    /** Resolves when the next upload may start: all bytes were sent, or this one needs the user. */
    this.sent = new Promise((resolve) => (this.#sent = resolve));
  }

  /** Runs until the document is ready, or the user must act. */
  async run() {
    const { signal } = this.#abort;
    for (let failures = 0; ; ) {
      try {
        if (await this.#step(signal)) break;
        failures = 0;
      } catch (error) {
        if (isAbort(error)) break;
        if (!(await this.#mend(error, (failures += 1)))) break;
      }
    }
    this.#sent();
  }

  stop() {
    this.#abort.abort();
    this.#sent();
  }

  /** Sends one part, or follows the progress. Resolves to whether this was the last step. */
  async #step(signal) {
    if (this.what.type) return this.#whole(signal);
    const { size } = this.what;
    if (this.#offset === null) this.#offset = await this.#look(signal);
    if (this.#offset < size && !this.file) {
      this.store.patch({ phase: "file" });
      return true;
    }
    const end = Math.min(this.#offset + this.#part, size);
    const bytes = this.#offset < size ? this.file.slice(this.#offset, end) : null;
    const started = performance.now();
    if (bytes) this.store.patch({ phase: "sending", until: null });
    const response = await sendPart(this.what, this.#offset, bytes, signal);
    for await (const { type, data } of eventsOf(response)) {
      if (data === undefined) continue;
      const progress = JSON.parse(data);
      if (type === "error") throw refusalOf(progress.error);
      if (progress.phase === "ready") return this.#done(progress.context);
      if (progress.phase === "incomplete") {
        this.#measure(bytes?.size ?? 0, (performance.now() - started) / 1000);
        this.#offset = progress.received_bytes;
        this.store.patch({ received: this.#offset });
        return false;
      }
      this.#take(progress);
    }
    throw new Unreachable("the stream ended");
  }

  /** Sends a whole file, and follows its extraction. Repeating it continues the upload. */
  async #whole(signal) {
    if (!this.file) {
      this.store.patch({ phase: "file" });
      return true;
    }
    this.store.patch({ phase: "sending", until: null });
    const response = await sendWhole(this.what, this.file, signal);
    this.#sent();
    for await (const { type, data } of eventsOf(response)) {
      if (data === undefined) continue;
      const progress = JSON.parse(data);
      if (type === "error") throw refusalOf(progress.error);
      if (progress.phase === "ready") return this.#done(progress.context);
      if (progress.phase === "extracting") this.#extract(progress);
      else this.#take({ ...progress, received_bytes: this.what.size });
    }
    throw new Unreachable("the stream ended");
  }

  #extract({ file, place, left_out = [], left_out_count = 0 }) {
    const name = [file, place].filter(Boolean).join(", ");
    const leftOut = left_out.map((each) => `${each.file} ${each.reason}`);
    const numUnlisted = Math.max(0, left_out_count - leftOut.length);
    this.store.patch({ phase: "extracting", received: this.what.size, place: name, ...(leftOut.length ? { leftOut, numUnlisted } : {}) });
  }

  async #look(signal) {
    const { offset, complete } = await lookAtUpload(this.what, signal);
    const received = complete ? this.what.size : offset;
    this.store.patch({ received });
    return received;
  }

  #take({ phase, received_bytes, received_tokens, processed, total, tokens_per_second }) {
    const { size } = this.what;
    const received = Math.min(size, received_bytes || this.store.value.received);
    if (received === size) this.#sent();
    this.store.patch({
      phase: phase === "recovering" ? "recovering" : received < size ? "sending" : "reading",
      until: null,
      received,
      receivedTokens: received_tokens || this.store.value.receivedTokens,
      processed,
      total,
      rate: tokens_per_second,
    });
  }

  #done(context) {
    this.store.patch({ phase: "done", received: this.what.size, context });
    return true;
  }

  #measure(size, seconds) {
    if (!size || !seconds) return;
    const { byteRate } = this.store.value;
    const now = size / seconds;
    this.store.patch({ byteRate: byteRate ? 0.7 * byteRate + 0.3 * now : now });
    const wanted = seconds < SECONDS / 2 ? this.#part * 2 : seconds > SECONDS * 2 ? this.#part / 2 : this.#part;
    this.#part = Math.min(LARGEST, Math.max(SMALLEST, wanted));
  }

  /** Handles an error. Resolves to whether the upload continues, at another offset or after a delay. */
  async #mend(error, failures) {
    this.#offset = null;
    if (error instanceof Refusal && error.code === "wrong_offset" && failures < 5) return true;
    if (!passes(error)) {
      this.store.patch({ phase: "failed", error });
      return false;
    }
    const wait = Math.max(error.retryAfter ?? 0, Math.min(2 ** (failures - 1), LONGEST_PAUSE));
    this.store.patch({ phase: "waiting", error, until: Date.now() / 1000 + wait });
    const over = new AbortController();
    const { signal } = this.#abort;
    await Promise.race([
      new Promise((resolve) => setTimeout(resolve, wait * 1000)),
      foundAgain(AbortSignal.any([signal, over.signal])).catch(() => {}), // stopped, or the delay is over
    ]);
    over.abort();
    return !signal.aborted;
  }
}

/** Resolves when a lost connection is back, which may be before the end of the delay. */
async function foundAgain(signal) {
  await service.store.until(({ link }) => link === "lost", signal);
  await service.store.until(({ link }) => link === "live", signal);
}

/** The number of tokens, and whether it is estimated from the part that was tokenized. */
export function allTokens({ size }, { received, receivedTokens, total }) {
  if (total) return { tokens: total, isGuess: false };
  return { tokens: received ? Math.round((receivedTokens / received) * size) : 0, isGuess: received < size };
}

/** Estimated seconds until the document is ready; null if unknown. */
export function timeLeft(what, state) {
  const { received, processed, rate, byteRate } = state;
  const { tokens } = allTokens(what, state);
  const reading = rate && tokens ? Math.max(0, tokens - processed) / rate : null;
  const sending = received < what.size && byteRate ? (what.size - received) / byteRate : null;
  return reading === null ? sending : Math.max(reading, sending ?? 0);
}
