// The list of documents.
import { AddButton } from "./add_document.js";
import { useNow } from "./clock.js";
import { contexts, titleOf } from "./contexts.js";
import { sentence } from "./errors.js";
import { nameOf } from "./files.js";
import { ago, tokens, until, when } from "./format.js";
import { html } from "./html.js";
import { addressOf, CHAT, opened } from "./route.js";
import { service } from "./service.js";
import { useStore } from "./store.js";
import { UploadProgress } from "./upload_progress.js";

export function DocumentList() {
  const { list, error } = useStore(contexts.store);
  const { link } = useStore(service.store);
  return html`<aside class="shelf" aria-label="Documents">
    <div class="line"><h2 tabindex="-1">Documents</h2><${AddButton} isMain=${list?.length === 0} /></div>
    <${UploadProgress} />
    <${ChatLink} />
    ${error && link === "live" && html`<p class="error" role="alert">${sentence(error)}
      <button onClick=${() => contexts.refresh()}>Try again</button></p>`}
    ${list?.length === 0 && html`<p class="quiet">There are no documents yet.</p>`}
    ${list === null && link === "opening" && html`<p class="quiet">Loading…</p>`}
    ${list?.length > 0 && html`<ul class="books" aria-label="List of documents">
      ${list.map((context) => html`<${Book} key=${context.id} context=${context} />`)}
    </ul>`}
  </aside>`;
}

function ChatLink() {
  useStore(service.store);
  const isOpen = useStore(opened) === CHAT;
  return service.chats && html`<p class="books"><a href=${addressOf(CHAT)} aria-current=${isOpen ? "true" : null}>
    <span class="title">Chat</span><span class="numbers">without a document</span></a></p>`;
}

const STATES = {
  evicted: "evicted: reloaded on the next question",
  restoring: "being reloaded",
};

function Book({ context }) {
  const now = useNow();
  const isOpen = useStore(opened) === context.id;
  const { id, pinned, expires, state, created } = context;
  return html`<li>
    <a href=${addressOf(id)} aria-current=${isOpen ? "true" : null}>
      <span class="title">${titleOf(context)}</span>
      ${nameOf(titleOf(context)) !== id && html`<span class="quiet name">${id}</span>`}
      <span class="numbers">
        <span>${tokens(context.tokens)}</span>
        <span title=${when(created)}>${ago(created, now)}</span>
        ${pinned && html`<span>pinned</span>`}
        ${expires !== null && html`<span title=${when(expires)}>expires ${until(expires, now)}</span>`}
        ${STATES[state] && html`<span>${STATES[state]}</span>`}
      </span>
    </a>
  </li>`;
}
