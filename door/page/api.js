// Calls of the door's HTTP API. Paths are relative, so that the page also works below a prefix of a proxy.
import { credential } from "./credential.js";
import { Refusal, Unreachable } from "./errors.js";

const context = (id) => `v1/contexts/${encodeURIComponent(id)}`;

/** The response of a call that succeeded. Where a credential is required it asks for one and calls again. */
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
    // another call may have been given a new one meanwhile
    if (response.status !== 401 || !(await credential.another(secret, signal))) throw refusal;
  }
}

async function send(path, options) {
  try {
    return await fetch(path, { cache: "no-store", credentials: "omit", redirect: "error", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("nobody answers");
  }
}

async function refusalIn(response) {
  const told = await response.json().catch(() => null);
  return new Refusal(response.status, told?.error ?? {}, response.headers);
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

/** The stream of the cluster. */
export function watchCluster(signal) {
  return call("v1/cluster", { signal });
}

/** The stream of an answer. */
export function complete(body, signal) {
  return call("v1/chat/completions", { method: "POST", json: { ...body, stream: true }, signal });
}

/** An upload is the same one as long as all of this is. */
function uploadPath({ id, uploadId, append, title }) {
  const query = new URLSearchParams({ upload_id: uploadId, append, ...(append ? {} : { display_name: title }) });
  return `${context(id)}?${query}`;
}

/** How many bytes of an upload the service has, and whether these are all. */
export async function lookAtUpload(what, signal) {
  const { headers } = await call(uploadPath(what), { method: "HEAD", signal, headers: { "upload-length": String(what.size) } });
  return { offset: Number(headers.get("upload-offset")), complete: headers.get("upload-complete") === "?1" };
}

/** Ends an upload, also while it is read. Nothing of it stays. */
export async function endUpload({ id, uploadId }) {
  await call(`${context(id)}?${new URLSearchParams({ upload_id: uploadId })}`, { method: "DELETE" });
}

/** Sends bytes that begin at `offset`; the stream tells how far the document is. */
export function sendPart(what, offset, bytes, signal) {
  return call(uploadPath(what), {
    method: "POST",
    body: bytes,
    signal,
    headers: { "content-type": "text/plain", "upload-offset": String(offset), "upload-length": String(what.size) },
  });
}
