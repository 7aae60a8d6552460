// What calls end with when they do not succeed, and the sentences that say so, each with what to do.
import { duration } from "./format.js";

/** Nobody answered, or the answer broke off. */
export class Unreachable extends Error {}

/** The service said no, and why. */
export class Refusal extends Error {
  constructor(status, { message = "", type = "", param = null, code = null } = {}, headers = new Headers()) {
    super(message);
    Object.assign(this, { status, type, param, code, headers });
  }

  /** Seconds after which it may be tried again; null where the service names none. */
  get retryAfter() {
    const seconds = Number.parseFloat(this.headers.get("retry-after"));
    return Number.isFinite(seconds) ? seconds : null;
  }

  /** Whether the same call may succeed later, with nothing changed. */
  get passes() {
    return [502, 503, 504].includes(this.status) || (this.status === 429 && this.retryAfter !== null);
  }
}

const CODES = {
  context_not_found: 404,
  model_not_found: 404,
  not_found: 404,
  already_exists: 409,
  wrong_offset: 409,
  cancelled: 409,
  checkpoint_changed: 409,
  failed_precondition: 409,
  context_lost: 410,
  data_loss: 410,
  not_finite: 410,
  bad_gateway: 502,
  unavailable: 503,
};
const TYPES = {
  invalid_request_error: 400,
  authentication_error: 401,
  permission_error: 403,
  rate_limit_error: 429,
  timeout_error: 504,
};

/** An `error` event: its status is in its code or type, since that of the response was sent long before. */
export function refusalOf(error) {
  // nor are there headers: only the code tells whether waiting helps
  const headers = new Headers(error.code === "rate_limit_exceeded" ? { "retry-after": "1" } : {});
  return new Refusal(CODES[error.code] ?? TYPES[error.type] ?? 500, error, headers);
}

/** Whether waiting and trying again is all that can be done, and may help. */
export const passes = (error) => error instanceof Unreachable || (error instanceof Refusal && error.passes);

/** Whether the same call can never succeed: what it sends must change first. */
export const isFinal = (error) => error instanceof Refusal && [400, 413, 415].includes(error.status);

/** Whether the reader ended it. */
export const isAbort = (error) => error?.name === "AbortError";

export function sentence(error) {
  if (error instanceof Unreachable) return "The service cannot be reached. The page keeps trying; nothing is lost.";
  if (!(error instanceof Refusal)) return `The page failed: ${error?.message ?? error}. Reload it.`;
  return SENTENCES[error.status]?.(error) ?? `The service says: ${told(error)}`;
}

const SENTENCES = {
  400: (error) => `The service does not take this: ${told(error)}`,
  401: () => "The service asks for a credential. Give the one that you were told.",
  403: (error) => `Your credential does not allow this: ${told(error)} Use another one, or ask who runs the service.`,
  404: (error) =>
    error.code === "model_not_found" || error.code === "context_not_found"
      ? "This document is not there any more. It was deleted, or it has expired; add its file again."
      : `This is not there: ${told(error)}`,
  409: (error) =>
    error.code === "already_exists"
      ? "This name is taken. Choose another one, or add the file to the end of the document that has it."
      : `This cannot be done now: ${told(error)}`,
  410: (error) => `What was kept of this is damaged: ${told(error)} Add the file again.`,
  413: (error) => `This is too large: ${told(error)}`,
  415: () => "Only plain text can be read. Save the document as text, and add that file.",
  421: () => "The service does not answer under this address. Open the page by the address that its operator names.",
  429: (error) =>
    error.retryAfter === null
      ? `There is no room: ${bare(error)} Delete what you no longer need, or wait until something expires.`
      : `The service is busy. It can be tried again in ${duration(Math.max(1, error.retryAfter))}.`,
  502: unavailable,
  503: unavailable,
  504: () => "This took longer than it may. Try again when less is going on.",
};

function unavailable(error) {
  if (/does not answer|cannot be reached/.test(error.message)) return "The service cannot be reached. It may be there again in a moment.";
  return `The service cannot do this now: ${told(error)} It may in a moment.`;
}

/** What there is no room for, without the service's own advice, which is for those who speak to it directly. */
const bare = (error) => told({ ...error, message: error.message.replace(/^(window )?pool: /, "").replace(/; delete a context.*$/, "") });

/** The service's own words, as a sentence: without the field, and without options that its operator alone can set. */
function told(error) {
  const own = (error.message || `status ${error.status}`).trim();
  const words = own.replace(/^body: /, "").replace(/ \(only serve --allow-long goes beyond it\)/, "");
  return /[.!?]$/.test(words) ? words : `${words}.`;
}
