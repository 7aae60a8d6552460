// Adding documents: files are chosen or dropped, then named, then uploaded.
import { contexts, titleOf } from "./contexts.js";
import { Dialog } from "./dialog.js";
import { chosenIn, complaint, filesOf, freeName, inspect, isFolder, nameOf } from "./files.js";
import { bytes, tokens, words } from "./format.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { service } from "./service.js";
import { Store, useStore } from "./store.js";
import { uploads } from "./uploads.js";

// Texts have about 4 bytes per token. A text with more bytes per token than this is rare.
const MOST_BYTES_PER_TOKEN = 8;

/** The longest document, as a sentence; "" if it is unknown. */
export function longestDocument() {
  const { longest } = service;
  return Number.isFinite(longest) ? `It may have up to ${tokens(longest)}, which are about ${words(longest)}.` : "";
}

/** Whether a file almost certainly has too many tokens. */
const isTooLong = ({ size, type }, held) => !type && size > MOST_BYTES_PER_TOKEN * Math.max(0, service.longest - held);

/** Files and folders in the naming dialog: [{file, name, size, type, id, append, objection}]. */
const chosen = new Store([]);

/** Files and folders are appended to the document `end`; without it, each becomes a new document. */
async function choose(files, end) {
  const taken = new Set([...contexts.ids, ...uploads.ids]);
  const rows = [];
  for (const file of files) {
    const id = end?.id ?? freeName(nameOf(file.name), taken);
    taken.add(id);
    const { body, ...kind } = await inspect(file);
    rows.push({ file: body, name: file.name, size: body.size, ...kind, id, end, append: !!end });
  }
  chosen.set(rows);
}

export function AddButton({ isMain, end, children = "Add documents…" }) {
  const [input, folder] = [useRef(null), useRef(null)];
  const pick = ({ currentTarget }) => {
    const picked = chosenIn(currentTarget);
    currentTarget.value = ""; // so that the same file can be chosen again
    choose(picked, end);
  };
  return html`<button class=${isMain ? "main" : ""} onClick=${() => input.current.click()}>${children}</button>
    <input ref=${input} class="unseen" type="file" multiple=${!end} tabindex="-1" aria-hidden="true" onChange=${pick} />
    ${!end && html`<button onClick=${() => folder.current.click()}>Add a folder…</button>
      <input ref=${folder} class="unseen" type="file" webkitdirectory tabindex="-1" aria-hidden="true" onChange=${pick} />`}`;
}

/** An overlay while files are dragged over the page. */
export function DropZone() {
  const [isOver, setOver] = useState(false);
  useEffect(() => {
    const bears = (event) => event.dataTransfer?.types.includes("Files");
    const over = (event) => {
      if (!bears(event)) return;
      event.preventDefault();
      setOver(true);
    };
    const out = (event) => event.relatedTarget === null && setOver(false);
    const drop = (event) => {
      if (!bears(event)) return;
      event.preventDefault();
      setOver(false);
      filesOf(event.dataTransfer).then((files) => choose(files));
    };
    const listeners = { dragover: over, dragleave: out, drop };
    for (const [name, listener] of Object.entries(listeners)) addEventListener(name, listener);
    return () => Object.entries(listeners).forEach(([name, listener]) => removeEventListener(name, listener));
  }, []);
  return isOver && html`<div class="veil"><p>Drop files or folders to add them</p></div>`;
}

/** The error of a row, or "". */
function wrong(row, rows) {
  if (row.objection) return row.objection;
  const found = complaint(row.id);
  if (found) return found;
  if (rows.some((other) => other !== row && other.id === row.id && !other.objection)) return "Each file needs its own name.";
  return "";
}

export function NameForm() {
  const rows = useStore(chosen);
  useStore(contexts.store);
  useStore(service.store);
  if (!rows.length) return null;
  const close = () => chosen.set([]);
  const change = (row, fields) => chosen.set(rows.map((each) => (each === row ? { ...each, ...fields } : each)));
  const going = rows.filter((row) => !row.objection);
  const isReady = going.length > 0 && going.every((row) => !wrong(row, rows) && (row.append || !contexts.find(row.id)));
  const add = () => {
    if (!isReady) return;
    uploads.add(going);
    close();
  };
  const [{ end }] = rows;
  const title = end ? `Append to ${titleOf(end)}` : rows.length === 1 ? "Add a document" : `Add ${rows.length} documents`;
  return html`<${Dialog} title=${title} onClose=${close} onSubmit=${add}>
    <p class="quiet">${end
      ? "The file is appended to the document. This cannot be undone: fork the document first to keep the original."
      : "Programs use the name to ask about the document. It is also in the address of its page."} ${longestDocument()}</p>
    <ul class="rows">
      ${rows.map((row, index) => html`<${NameRow} key=${`${index} ${row.name}`} ...${{ row, rows, index, change }} />`)}
    </ul>
    <div class="choices">
      <button type="button" onClick=${close}>Cancel</button>
      <button type="submit" class="main" autofocus=${!!end} disabled=${!isReady}>Upload</button>
    </div>
  <//>`;
}

function NameRow({ row, rows, index, change }) {
  const problem = wrong(row, rows);
  const other = !problem && contexts.find(row.id);
  const note = `name-note-${index}`;
  return html`<li>
    <p><b>${row.name}</b> <span class="quiet">${isFolder(row.file) ? `${row.file.files.length} files, ` : ""}${bytes(row.size)}</span></p>
    ${!row.objection && !row.end && html`<label class="field">Name
      <input value=${row.id} autofocus=${index === 0} spellcheck=${false} autocomplete="off" autocapitalize="none" maxlength="80"
        aria-invalid=${problem || (other && !row.append) ? "true" : null} aria-describedby=${note}
        onInput=${(event) => change(row, { id: event.currentTarget.value.trim(), append: false })} />
    </label>`}
    <div id=${note} aria-live="polite">
      ${problem && html`<p class="error">${problem}</p>`}
      ${!problem && isTooLong(row, row.end?.tokens ?? 0) && html`<p class="error">The file is probably too long for this model.</p>`}
      ${other && !row.end && html`<p>${titleOf(other)} has this name.
        <span class="choices near">
          <button type="button" onClick=${() => change(row, { id: freeName(row.id, contexts.ids), append: false })}>
            Use the name ${freeName(row.id, contexts.ids)}
          </button>
          <label><input type="checkbox" checked=${row.append}
            onChange=${(event) => change(row, { append: event.currentTarget.checked })} /> Append to the document</label>
        </span></p>`}
    </div>
  </li>`;
}
