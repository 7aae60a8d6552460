// The chat without a document.
import { Ask } from "./ask.js";
import { credential } from "./credential.js";
import { html, useEffect, useRef } from "./html.js";
import { CHAT } from "./route.js";
import { service } from "./service.js";
import { useStore } from "./store.js";

export function Chat() {
  const title = useRef(null);
  const number = useStore(credential.given);
  useStore(service.store);
  useEffect(() => title.current.focus(), []);
  return html`<article aria-labelledby="chat-title">
    <a class="back" href="#/">Back to the documents</a>
    <h1 id="chat-title" ref=${title} tabindex="-1">Chat</h1>
    <p class="quiet">${service.chats
      ? `${service.model} answers without a document.`
      : `${service.model} cannot chat. Choose a document and ask about it.`}</p>
    ${service.chats && html`<${Ask} key=${number} id=${CHAT} />`}
  </article>`;
}
