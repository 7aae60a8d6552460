// The conversation about each document, or without one: saved in the browser, and sent with each further question.
import { say } from "./announcer.js";
import { complete } from "./api.js";
import { contexts } from "./contexts.js";
import { credential } from "./credential.js";
import { isAbort, refusalOf, Unreachable } from "./errors.js";
import { CHAT } from "./route.js";
import { load, save } from "./saved_conversations.js";
import { service } from "./service.js";
import { requestFields, sourceFields, systemMessages } from "./settings.js";
import { eventsOf } from "./sse.js";
import { Store } from "./store.js";

const LONGEST_SAID = 400;

/** Whether questions are sent with the previous conversation. */
const wanted = new Store(true);

export const goingOn = {
  store: wanted,
  get value() {
    return wanted.value && !service.looksUp;
  },
};

/** The turns about one context, or without one (CHAT): [{question, answer, phase, note, error, body, reason, sources,
 * usage, seconds, firstSeconds}], phase being "waiting", "writing", "done", "stopped" or "failed". `body` is the request. */
export class Conversation {
  store;
  #abort = null;

  constructor(id, created) {
    this.id = id;
    this.created = created;
    this.store = new Store(load(id, created));
  }

  get isBusy() {
    return ["waiting", "writing"].includes(this.store.value.at(-1)?.phase);
  }

  async ask(question) {
    if (this.isBusy) return;
    const body = this.request(question, this.store.value);
    const started = performance.now();
    const since = () => (performance.now() - started) / 1000;
    this.#abort = new AbortController();
    const turn = { question, answer: "", phase: "waiting", note: "", error: null, body, sources: null, usage: null, seconds: null, firstSeconds: null };
    this.store.set([...this.store.value, turn]);
    say("Asked.");
    try {
      await this.#read(await complete({ ...body, stream_options: { include_usage: true } }, this.#abort.signal), since);
      this.#end({ phase: "done", seconds: since() });
      const { answer, reason, sources } = this.store.value.at(-1);
      const found = sources?.length ? `, with ${sources.length} ${sources.length === 1 ? "source" : "sources"}` : "";
      say(`Answered${reason === "length" ? ", but cut off" : ""}${found}: ${answer.slice(0, LONGEST_SAID)}`);
    } catch (error) {
      this.#end({ seconds: since(), ...(isAbort(error) ? { phase: "stopped" } : { phase: "failed", error }) });
      if (isAbort(error)) say("Stopped.");
    }
    this.save();
    if (this.id !== CHAT) contexts.refresh(); // its last use and its state have changed
  }

  /** Asks the last question again, in its place. */
  again() {
    const { question } = this.store.value.at(-1);
    this.store.set(this.store.value.slice(0, -1));
    return this.ask(question);
  }

  /** Whether the last question would be sent differently now. */
  get wouldDiffer() {
    const { question, body } = this.store.value.at(-1);
    return JSON.stringify(this.request(question, this.store.value.slice(0, -1))) !== JSON.stringify(body);
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.store.set([]);
    this.save();
  }

  save() {
    if (all.get(this.id) === this) save(this.id, this.created, this.store.value);
  }

  /** The request for a question, after the previous complete or stopped turns. */
  request(question, turns) {
    const before = (goingOn.value ? turns : [])
      .filter(({ phase, answer }) => answer && (phase === "done" || phase === "stopped"))
      .flatMap((turn) => [
        { role: "user", content: turn.question },
        { role: "assistant", content: turn.answer },
      ]);
    const messages = [...(service.looksUp ? [] : systemMessages()), ...before, { role: "user", content: question }];
    const model = this.id === CHAT ? service.model : `${service.model}:${this.id}`;
    return { model, messages, ...requestFields(this.#room(messages)), ...(this.id === CHAT ? {} : sourceFields()) };
  }

  /** A lower bound of the tokens that are left for an answer. A token has at least one byte of text. */
  #room(messages) {
    const used = messages.reduce((sum, { content }) => sum + new Blob([content]).size + 16, 0);
    return service.longest - (contexts.find(this.id)?.tokens ?? 0) - used;
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
          else if (choices[0]?.delta?.reasoning_content) this.#wait("thinking");
          if (choices[0]?.finish_reason) this.#patch({ reason: choices[0].finish_reason, sources: choices[0].sources ?? null });
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

/** The conversation about the context `id` that was created at this time; 0 for CHAT. */
export function conversationAbout(id, created = 0) {
  if (all.get(id)?.created !== created) {
    all.get(id)?.stop();
    all.set(id, new Conversation(id, created));
  }
  return all.get(id);
}

// another credential has other conversations
credential.given.follow(() => {
  for (const conversation of all.values()) conversation.stop();
  all.clear();
});
// an answer that is being written counts as stopped
addEventListener("pagehide", () => {
  for (const conversation of all.values()) if (conversation.isBusy) conversation.save();
});

/** Removes the conversation, because the name may be used for another context. */
export function forget(id) {
  all.get(id)?.clear();
  all.delete(id);
  save(id, 0, []);
}
