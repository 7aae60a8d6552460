// The progress of uploads: sent and read parts, rates, remaining times, left out files, and actions for interrupted ones.
import { useNow } from "./clock.js";
import { contexts } from "./contexts.js";
import { isFinal, Refusal, sentence } from "./errors.js";
import { chosenIn, freeName, inspect } from "./files.js";
import { bytes, count, duration, percent, tokens } from "./format.js";
import { html, useRef, useState } from "./html.js";
import { useStore } from "./store.js";
import { allTokens, timeLeft } from "./upload.js";
import { uploads } from "./uploads.js";

const MOST_OPEN = 5;

export function UploadProgress() {
  const list = useStore(uploads.store);
  if (!list.length) return null;
  return html`<section class="on-their-way" aria-labelledby="sending-title">
    <h2 id="sending-title">Uploads</h2>
    <ul class="sending">${list.map((upload) => html`<${OneUpload} key=${upload.what.uploadId} upload=${upload} />`)}</ul>
  </section>`;
}

function OneUpload({ upload }) {
  const state = useStore(upload.store);
  const { what } = upload;
  return html`<li class="card">
    <p class="line"><span><b>${what.title}</b>${what.append && html` <span class="quiet">appended to ${what.id}</span>`}</span>
      <${DropButton} ...${{ upload, state }} /></p>
    ${state.phase === "done" ? html`<p class="quiet">The document is ready.</p>` : html`<${Bar} ...${{ what, state }} /><${Numbers} ...${{ what, state }} />`}
    ${isAllThere(state) && html`<p class="quiet">The upload is complete. Processing continues if you close this page.</p>`}
    ${state.leftOut.length > 0 && html`<${LeftOut} state=${state} />`}
    ${state.phase === "waiting" && html`<${Waiting} state=${state} />`}
    ${state.phase === "file" && html`<${ChooseAgain} ...${{ upload, state }} />`}
    ${state.phase === "failed" && html`<${Failed} ...${{ upload, state }} />`}
  </li>`;
}

/** The list of files without text, which is open if it is short. */
function LeftOut({ state: { leftOut, numUnlisted } }) {
  return html`<details open=${leftOut.length <= MOST_OPEN}>
    <summary>Left out</summary>
    <ul>${leftOut.map((each, index) => html`<li key=${index}>${each}</li>`)}${numUnlisted > 0 && html`<li>and ${count(numUnlisted)} more</li>`}</ul>
  </details>`;
}

/** Whether the service has all bytes, and continues without the page. */
const isAllThere = ({ phase }) => phase === "reading" || phase === "recovering";

function DropButton({ upload, state }) {
  const isOver = state.phase === "failed" || state.phase === "done";
  const word = isOver ? "Dismiss" : "Stop";
  return html`<button class="plain" aria-label="${word} ${upload.what.title}" disabled=${state.phase === "stopping"}
    onClick=${() => (isOver ? uploads.drop(upload) : uploads.cancel(upload))}>${word}</button>`;
}

/** A bar with the sent part, and over it the part that was read. */
function Bar({ what, state }) {
  const sent = what.size ? state.received / what.size : 0;
  const { tokens: all } = allTokens(what, state);
  const read = all ? Math.min(1, state.processed / all) : 0;
  return html`<div class="bar" role="progressbar" aria-label="${what.title}: read" aria-valuemin="0" aria-valuemax="100"
    aria-valuenow=${Math.floor(100 * read)} aria-valuetext="${percent(sent, 1)} sent, ${percent(read, 1)} read">
    <span class="sent" style=${{ width: `${100 * sent}%` }}></span>
    <span class="read" style=${{ width: `${100 * read}%` }}></span>
  </div>`;
}

const PHASES = { queued: "Queued", recovering: "A rank was lost; restoring its part", sending: "Sending", extracting: "Extracting text", reading: "Reading", stopping: "Stopping" };

function Numbers({ what, state }) {
  const { phase, received, processed, rate, place } = state;
  const all = allTokens(what, state);
  const left = timeLeft(what, state);
  const goesOn = phase === "sending" || phase === "reading";
  return html`<p class="numbers">
    ${PHASES[phase] && html`<span>${PHASES[phase]}</span>`}
    ${phase === "extracting" && place && html`<span>${place}</span>`}
    <span>${received < what.size ? `${bytes(received)} of ${bytes(what.size)}` : bytes(what.size)} sent</span>
    ${all.tokens > 0 && html`<span>${count(processed)} of ${all.isGuess ? "about " : ""}${tokens(all.tokens)} read</span>`}
    ${goesOn && rate > 0 && html`<span>${count(rate)} tokens/s</span>`}
    ${goesOn && left !== null && html`<span>about ${duration(left)} left</span>`}
  </p>`;
}

function Waiting({ state: { error, until } }) {
  const seconds = Math.max(0, until - useNow());
  return html`<p class="error">${sentence(error)} The upload continues automatically ${seconds < 1 ? "now" : `in ${duration(seconds)}`}.</p>`;
}

function ChooseAgain({ upload, state: { received } }) {
  const input = useRef(null);
  const [isOther, setOther] = useState(false);
  const { fileName, size, type } = upload.what;
  const isFolderUpload = type === "multipart/form-data";
  const take = async ({ currentTarget }) => {
    const [file] = chosenIn(currentTarget);
    currentTarget.value = "";
    if (!file) return;
    const { body } = await inspect(file);
    if (body.size === size) uploads.again(upload, { file: body });
    else setOther(true);
  };
  return html`<p>The page was reloaded during the upload. ${received > 0 ? `The service has the first ${bytes(received)}.` : ""} Choose
      ${" "}<b>${fileName}</b> again to continue.</p>
    ${isOther && html`<p class="error" role="alert">This file has a different size: choose ${fileName} with ${bytes(size)}.</p>`}
    <button class="main" onClick=${() => input.current.click()}>Choose ${fileName}…</button>
    <input ref=${input} class="unseen" type="file" webkitdirectory=${isFolderUpload} tabindex="-1" aria-hidden="true" onChange=${take} />`;
}

function Failed({ upload, state: { error } }) {
  const { id, append } = upload.what;
  const isTaken = error instanceof Refusal && error.status === 409 && !append;
  const other = freeName(id, contexts.ids.add(id));
  return html`<p class="error" role="alert">${isTaken ? `The name ${id} is taken.` : sentence(error)}</p>
    <div class="choices near">
      ${isTaken
        ? html`<button onClick=${() => uploads.again(upload, { id: other })}>Use the name ${other}</button>
            <button onClick=${() => uploads.again(upload, { append: true })}>Append to the document</button>`
        : !isFinal(error) && html`<button onClick=${() => uploads.again(upload)}>Try again</button>`}
    </div>`;
}
