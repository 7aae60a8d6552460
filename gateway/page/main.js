// The page: layout and start.
import { AddButton, DropZone, longestDocument, NameForm } from "./add_document.js";
import { Announcer } from "./announcer.js";
import { Chat } from "./chat.js";
import { useNow } from "./clock.js";
import { contexts } from "./contexts.js";
import { CredentialButton, CredentialForm } from "./credential.js";
import { Document } from "./document.js";
import { DocumentList } from "./document_list.js";
import { sentence } from "./errors.js";
import { duration } from "./format.js";
import { html, render } from "./html.js";
import { PlacementMap } from "./placement_map.js";
import { addressOf, CHAT, opened } from "./route.js";
import { service } from "./service.js";
import { useStore } from "./store.js";
import { uploads } from "./uploads.js";

function Page() {
  const { link, cluster } = useStore(service.store);
  const id = useStore(opened);
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the document</a>
    <header>
      <p class="brand">Longleaf</p>
      <p class="quiet">${cluster?.model.name}</p>
      <${Link} link=${link} />
      <${CredentialButton} isLocked=${link === "locked"} />
    </header>
    <${Lost} />
    <div class=${id ? "columns reading" : "columns"}>
      <${DocumentList} />
      <main id="main" tabindex="-1"><${Open} id=${id} /></main>
      <${PlacementMap} />
    </div>
    <${NameForm} /><${CredentialForm} /><${DropZone} /><${Announcer} />`;
}

/** Moves the focus, because the fragment of the address is the open document. */
function skip(event) {
  event.preventDefault();
  (document.getElementById("question") ?? document.getElementById("main")).focus();
}

const LINKS = { opening: "connecting", live: "connected", lost: "not connected", locked: "locked" };

const Link = ({ link }) => html`<p class="link ${link}">${LINKS[link]}</p>`;

function Lost() {
  const { link, error, retryAt } = useStore(service.store);
  const now = useNow();
  if (link === "locked") return html`<div class="band error" role="alert"><p>${sentence(error)}</p></div>`;
  if (link !== "lost") return null;
  const seconds = Math.max(0, Math.ceil(retryAt / 1000 - now));
  return html`<div class="band error">
    <p>${sentence(error)} ${seconds ? `Next try in ${duration(seconds)}.` : "Trying…"}</p>
    <button onClick=${() => service.retry()}>Try now</button>
  </div>`;
}

function Open({ id }) {
  const { list } = useStore(contexts.store);
  const { cluster } = useStore(service.store);
  const context = contexts.find(id);
  if (id === CHAT && cluster) return html`<${Chat} />`;
  if (context) return html`<${Document} key=${id} context=${context} />`;
  if (id && id !== CHAT && list) return html`<${Missing} id=${id} />`;
  if (list?.length) return html`<div class="empty beside"><h1>Choose a document</h1>
    <p>It has been read already, so answers start at once.</p></div>`;
  if (list) return html`<${Empty} />`;
  return html`<div class="empty"><p class="quiet">${id ? "Opening…" : ""}</p></div>`;
}

const Missing = ({ id }) => html`<div class="empty"><a class="back" href="#/">Back to the documents</a>
  <h1>${id} does not exist</h1>
  <p>It was deleted, has expired, or is still being uploaded. Choose another document, or add its file again.</p></div>`;

function Empty() {
  useStore(service.store);
  return html`<div class="empty">
  <h1>Add your first document</h1>
  <ol>
    <li><b>Add a file or a folder</b> with the buttons, or drop it on this page: text, PDF, Word, PowerPoint, HTML, EPUB,
      notebooks and archives. ${longestDocument()}</li>
    <li><b>Wait until it is read.</b> This happens once.</li>
    <li><b>Ask questions.</b> Every answer uses the whole document.</li>
  </ol>
  <${AddButton} isMain />
  ${service.chats && html`<p class="or">Or <a href=${addressOf(CHAT)}>chat without a document</a>.</p>`}
</div>`;
}

render(html`<${Page} />`, document.getElementById("page"));
uploads.resume();
service.watch();
// mark for measurements and tests: the page accepts input
performance.mark("interactive");
