// The conversation about each document: kept in memory, and sent with each further question.
import { complete } from "./api.js";
import { contexts } from "./contexts.js";
import { isAbort, refusalOf, Unreachable } from "./errors.js";
import { say } from "./live.js";
import { service } from "./service.js";
import { eventsOf } from "./sse.js";
import { Store } from "./store.js";

const LONGEST_SAID = 400;
// Limit of an answer, because a model may never generate its end token.
export const MOST_TOKENS = 4096;

/** Whether questions are sent with the previous conversation. */
const wanted = new Store(true);

export const goingOn = {
  store: wanted,
  get value() {
    return wanted.value && !service.looksUp;
  },
};

/** The turns about one context: [{question, answer, phase, note, error, usage, seconds, firstSeconds}], phase being
 * "waiting", "writing", "done", "stopped" or "failed". */
export class Conversation {
  store = new Store([]);
  #abort = null;

  constructor(id) {
    this.id = id;
  }

  get isBusy() {
    return ["waiting", "writing"].includes(this.store.value.at(-1)?.phase);
  }

  async ask(question) {
    if (this.isBusy) return;
    const messages = this.#messages(question);
    const started = performance.now();
    const since = () => (performance.now() - started) / 1000;
    this.#abort = new AbortController();
    const turn = { question, answer: "", phase: "waiting", note: "", error: null, usage: null, seconds: null, firstSeconds: null };
    this.store.set([...this.store.value, turn]);
    say("Asked.");
    try {
      const body = { model: `${service.model}:${this.id}`, messages, max_tokens: MOST_TOKENS, stream_options: { include_usage: true } };
      await this.#read(await complete(body, this.#abort.signal), since);
      this.#end({ phase: "done", seconds: since() });
      say(`Answered: ${this.store.value.at(-1).answer.slice(0, LONGEST_SAID)}`);
    } catch (error) {
      this.#end({ seconds: since(), ...(isAbort(error) ? { phase: "stopped" } : { phase: "failed", error }) });
      if (isAbort(error)) say("Stopped.");
    }
    contexts.refresh(); // its last use and its state have changed
  }

  /** Asks the last question again, in its place. */
  again() {
    const { question } = this.store.value.at(-1);
    this.store.set(this.store.value.slice(0, -1));
    return this.ask(question);
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.store.set([]);
  }

  /** The question, after the previous complete or stopped turns. */
  #messages(question) {
    const before = (goingOn.value ? this.store.value : [])
      .filter(({ phase, answer }) => answer && (phase === "done" || phase === "stopped"))
      .flatMap((turn) => [
        { role: "user", content: turn.question },
        { role: "assistant", content: turn.answer },
      ]);
    return [...before, { role: "user", content: question }];
  }

  async #read(response, since) {
    const writer = new Writer((fields) => this.#patch(fields));
    try {
      for await (const { type, data, comment } of eventsOf(response)) {
        if (comment !== undefined) this.#wait(comment);
        else if (data === "[DONE]") return;
        else if (type === "error" || data.startsWith('{"error"')) throw refusalOf(JSON.parse(data).error);
        else {
          const { choices, usage } = JSON.parse(data);
          if (usage) this.#patch({ usage });
          const text = choices[0]?.delta?.content;
          if (text) writer.add(text, since());
          if (choices[0]?.finish_reason) this.#patch({ reason: choices[0].finish_reason });
        }
      }
    } finally {
      writer.show();
    }
    throw new Unreachable("the stream ended");
  }

  #wait(note) {
    if (this.store.value.at(-1)?.phase === "waiting") this.#patch({ note });
  }

  #patch(fields) {
    const turns = this.store.value;
    if (turns.length) this.store.set([...turns.slice(0, -1), { ...turns.at(-1), ...fields }]);
  }

  /** Does nothing if `clear` has removed the turn. */
  #end(fields) {
    if (this.isBusy) this.#patch({ note: "", ...fields });
  }
}

/** Collects text between two frames, so that it renders once per frame. */
class Writer {
  #text = "";
  #first = null;
  #isDue = false;
  #patch;

  constructor(patch) {
    this.#patch = patch;
  }

  add(text, seconds) {
    this.#text += text;
    this.#first ??= seconds;
    if (this.#isDue) return;
    this.#isDue = true;
    // there are no animation frames in the background
    if (document.hidden) setTimeout(() => this.show(), 200);
    else requestAnimationFrame(() => this.show());
  }

  /** Renders the collected text, if any is due. */
  show() {
    if (!this.#isDue) return;
    this.#isDue = false;
    this.#patch({ answer: this.#text, phase: "writing", firstSeconds: this.#first });
  }
}

const all = new Map();

export function conversationAbout(id) {
  if (!all.has(id)) all.set(id, new Conversation(id));
  return all.get(id);
}

/** Removes the conversation, because the name may be used for another context. */
export function forget(id) {
  all.get(id)?.clear();
  all.delete(id);
}
