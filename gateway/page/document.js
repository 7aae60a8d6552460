// The open document: its properties and actions.
import { AddButton } from "./add_document.js";
import { say } from "./announcer.js";
import { changeContext, deleteContext, forkContext } from "./api.js";
import { Ask } from "./ask.js";
import { useNow } from "./clock.js";
import { contexts, titleOf } from "./contexts.js";
import { forget } from "./conversation.js";
import { Dialog } from "./dialog.js";
import { Refusal, sentence } from "./errors.js";
import { complaint, freeName } from "./files.js";
import { ago, bytes, count, tokens, until, when } from "./format.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { open } from "./route.js";

export function Document({ context }) {
  const { id } = context;
  const title = useRef(null);
  const [asked, setAsked] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => title.current.focus(), []);
  /** Runs an action, and shows its error. */
  const attempt = async (doing, done) => {
    setError(null);
    try {
      contexts.put(id, await doing());
      say(done);
    } catch (caught) {
      setError(caught);
      contexts.refresh();
    }
  };
  const close = () => setAsked(null);
  return html`<article aria-labelledby="document-title">
    <a class="back" href="#/">Back to the documents</a>
    <h1 id="document-title" ref=${title} tabindex="-1">${titleOf(context)}</h1>
    <${Facts} context=${context} />
    <div class="choices near" role="group" aria-label="This document">
      <button aria-pressed=${context.pinned} title="A pinned document never expires and is never evicted"
        onClick=${() => attempt(() => changeContext(id, { pinned: !context.pinned }), context.pinned ? "Unpinned." : "Pinned.")}>
        ${context.pinned ? "Pinned" : "Pin"}
      </button>
      <${Expiry} context=${context} onChange=${(changes) => attempt(() => changeContext(id, changes), "Changed the expiry time.")} />
      <${AddButton} end=${context}>Append…<//>
      <button onClick=${() => setAsked("fork")}>Fork…</button>
      <button class="danger" onClick=${() => setAsked("delete")}>Delete…</button>
    </div>
    ${error && html`<p class="error" role="alert">${sentence(error)} <button onClick=${() => setError(null)}>Dismiss</button></p>`}
    <${Ask} key=${`${id} ${context.created}`} id=${id} created=${context.created} />
    ${asked === "fork" && html`<${ForkForm} ...${{ context, close }} />`}
    ${asked === "delete" && html`<${DeleteForm} ...${{ context, close, attempt }} />`}
  </article>`;
}

function Facts({ context }) {
  const now = useNow();
  const { id, created, used, hits, kv_bytes: size, storage_bytes: stored, expires } = context;
  return html`<p class="numbers">
    <code>${id}</code>
    <span>${tokens(context.tokens)}</span>
    <span>${bytes(size)} of keys and values</span>
    ${stored > 0 && html`<span>${bytes(stored)} in storage</span>`}
    <span title=${when(created)}>added ${ago(created, now)}</span>
    ${hits > 0 && html`<span title=${when(used)}>asked ${count(hits)} ${hits === 1 ? "time" : "times"}, last ${ago(used, now)}</span>`}
    ${expires !== null && html`<span title=${when(expires)}>expires ${until(expires, now)}</span>`}
    ${context.exact === false && html`<span>answers are not exact</span>`}
  </p>`;
}

const TIMES = [["In an hour", 3600], ["In a day", 86400], ["In a week", 7 * 86400], ["In a month", 30 * 86400]];

function Expiry({ context: { expires }, onChange }) {
  const change = ({ currentTarget }) => {
    const { value } = currentTarget;
    if (value === "kept") return;
    onChange(value === "never" ? { expires: null } : { ttl: Number(value) });
    currentTarget.value = "kept";
  };
  return html`<label class="select">Expires
    <select value="kept" onChange=${change}>
      <option value="kept">${expires === null ? "Never" : when(expires)}</option>
      ${expires !== null && html`<option value="never">Never</option>`}
      ${TIMES.map(([name, seconds]) => html`<option key=${seconds} value=${seconds}>${name}</option>`)}
    </select>
  </label>`;
}

function ForkForm({ context, close }) {
  const { id, tokens: all } = context;
  const [name, setName] = useState(freeName(`${id.slice(0, 55)}-fork`, contexts.ids));
  const [part, setPart] = useState("");
  const [error, setError] = useState(null);
  const number = part.trim() === "" ? all : Number(part);
  const problem = complaint(name) || (contexts.find(name) ? `${name} is taken.` : "");
  const isPart = Number.isInteger(number) && number >= 1 && number <= all;
  const fork = async () => {
    if (problem || !isPart) return;
    try {
      const made = await forkContext(id, name, number === all ? null : number);
      contexts.put(made.id, made);
      say(`Forked as ${made.id}.`);
      close();
      open(made.id);
    } catch (caught) {
      setError(caught);
    }
  };
  return html`<${Dialog} title="Fork ${titleOf(context)}" onClose=${close} onSubmit=${fork}>
    <p>A fork is a new document that begins with the same text. Nothing is computed again, and shared text is stored once.</p>
    <label class="field">Name
      <input value=${name} autofocus spellcheck=${false} autocomplete="off" autocapitalize="none" aria-describedby="fork-note"
        aria-invalid=${problem ? "true" : null} onInput=${(event) => setName(event.currentTarget.value.trim())} /></label>
    <label class="field">Tokens from the beginning
      <input inputmode="numeric" value=${part} placeholder=${`all ${count(all)}`} aria-describedby="fork-note"
        aria-invalid=${isPart ? null : "true"} onInput=${(event) => setPart(event.currentTarget.value)} /></label>
    <div id="fork-note" aria-live="polite">
      ${problem && html`<p class="error">${problem}</p>`}
      ${!isPart && html`<p class="error">Give a number from 1 to ${count(all)}.</p>`}
      ${error && html`<p class="error" role="alert">${error instanceof Refusal && error.status === 409 ? `${name} is taken.` : sentence(error)}</p>`}
    </div>
    <div class="choices">
      <button type="button" onClick=${close}>Cancel</button>
      <button type="submit" class="main" disabled=${!!problem || !isPart}>Fork</button>
    </div>
  <//>`;
}

function DeleteForm({ context, close, attempt }) {
  const remove = () => {
    close();
    attempt(async () => {
      await deleteContext(context.id).catch((error) => {
        if (!(error instanceof Refusal && error.status === 404)) throw error;
      });
      forget(context.id);
      open("");
      // the focused element was removed: move the focus to the main region
      setTimeout(() => document.getElementById("main").focus());
      return null;
    }, `Deleted ${titleOf(context)}.`);
  };
  return html`<${Dialog} title="Delete ${titleOf(context)}?" onClose=${close} onSubmit=${remove}>
    <p>This deletes its ${tokens(context.tokens)} and cannot be undone. To restore it, the file must be added again.</p>
    <div class="choices">
      <button type="button" autofocus onClick=${close}>Keep it</button>
      <button type="submit" class="danger">Delete it</button>
    </div>
  <//>`;
}
