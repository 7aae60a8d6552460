// The open document or chat, which is the fragment of the address, so that reload and back work.
import { Store } from "./store.js";

const read = () => decodeURIComponent(location.hash.replace(/^#\/?/, ""));

/** Stands for the chat without a document; ids of contexts begin with a letter or a digit. */
export const CHAT = "~chat";

/** The id of the open context, or CHAT; "" if none is. */
export const opened = new Store(safely());

addEventListener("hashchange", () => opened.set(safely()));

export const addressOf = (id) => `#/${encodeURIComponent(id)}`;

export function open(id) {
  location.hash = id ? addressOf(id) : "#/";
}

function safely() {
  try {
    return read();
  } catch {
    return ""; // a truncated fragment
  }
}
