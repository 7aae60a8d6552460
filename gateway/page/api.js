// Calls of the gateway's HTTP API. Paths are relative, so that the page also works below a proxy's path prefix.
import { credential } from "./credential.js";
import { Refusal, Unreachable } from "./errors.js";
import { bodyOf } from "./files.js";

const context = (id) => `v1/contexts/${encodeURIComponent(id)}`;

/** The response of a successful call. If a credential is required, asks for one and calls again. */
async function call(path, { method = "GET", json, body, headers = {}, signal } = {}) {
  for (;;) {
    const secret = credential.secret;
    const response = await send(path, {
      method,
      signal,
      body: json === undefined ? body : JSON.stringify(json),
      headers: {
        ...headers,
        ...(json === undefined ? {} : { "content-type": "application/json" }),
        ...(secret ? { authorization: `Bearer ${secret}` } : {}),
      },
    });
    if (response.ok) return response;
    const refusal = await refusalIn(response);
    // another call may have received a new one meanwhile
    if (response.status !== 401 || !(await credential.another(secret, signal))) throw refusal;
  }
}

async function send(path, options) {
  try {
    return await fetch(path, { cache: "no-store", credentials: "omit", redirect: "error", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("no response");
  }
}

async function refusalIn(response) {
  const body = await response.json().catch(() => null);
  return new Refusal(response.status, body?.error ?? {}, response.headers);
}

export async function listContexts(signal) {
  return (await (await call("v1/contexts", { signal })).json()).data;
}

export async function changeContext(id, changes) {
  return (await call(context(id), { method: "PATCH", json: changes })).json();
}

export async function forkContext(id, name, tokens) {
  return (await call(`${context(id)}/fork`, { method: "POST", json: { id: name, ...(tokens ? { tokens } : {}) } })).json();
}

export async function deleteContext(id) {
  await call(context(id), { method: "DELETE" });
}

/** Tokens [start, end) of a document as text, with their position in it. */
export async function contextText(id, start, end, signal) {
  return (await call(`${context(id)}/text?${new URLSearchParams({ token_start: start, token_end: end })}`, { signal })).json();
}

/** The event stream of the cluster. */
export function watchCluster(signal) {
  return call("v1/cluster", { signal });
}

/** The event stream of an answer. */
export function complete(body, signal) {
  return call("v1/chat/completions", { method: "POST", json: { ...body, stream: true }, signal });
}

/** All of these values identify an upload. */
function uploadPath({ id, uploadId, append, title, fileName }) {
  const query = new URLSearchParams({ upload_id: uploadId, append, filename: fileName, ...(append ? {} : { display_name: title }) });
  return `${context(id)}?${query}`;
}

/** The number of bytes that the service has received, and whether they are all. */
export async function lookAtUpload(file, signal) {
  const { headers } = await call(uploadPath(file), { method: "HEAD", signal, headers: { "upload-length": String(file.size) } });
  return { offset: Number(headers.get("upload-offset")), complete: headers.get("upload-complete") === "?1" };
}

/** Cancels an upload, even during prefill, and discards it. */
export async function endUpload({ id, uploadId }) {
  await call(`${context(id)}?${new URLSearchParams({ upload_id: uploadId })}`, { method: "DELETE" });
}

/** Sends a whole file or folder, whose text the gateway extracts. The response is an event stream with the progress. */
export function sendWhole(file, source, signal) {
  const isForm = file.type === "multipart/form-data"; // the browser adds the boundary to its type
  return call(uploadPath(file), {
    method: "POST",
    body: bodyOf(source),
    signal,
    headers: isForm ? {} : { "content-type": file.type },
  });
}

/** Sends the bytes at `offset`. The response is an event stream with the progress. */
export function sendPart(file, offset, bytes, signal) {
  return call(uploadPath(file), {
    method: "POST",
    body: bytes,
    signal,
    headers: { "content-type": "text/plain", "upload-offset": String(offset), "upload-length": String(file.size) },
  });
}
