// Errors of calls, and their messages with the remedy.
import { duration } from "./format.js";

/** There was no response, or it was cut off. */
export class Unreachable extends Error {}

/** An error response of the service. */
export class Refusal extends Error {
  constructor(status, { message = "", type = "", param = null, code = null } = {}, headers = new Headers()) {
    super(message);
    Object.assign(this, { status, type, param, code, headers });
  }

  /** Retry delay in seconds; null if the service gives none. */
  get retryAfter() {
    const seconds = Number.parseFloat(this.headers.get("retry-after"));
    return Number.isFinite(seconds) ? seconds : null;
  }

  /** Whether a retry without changes may succeed. */
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
  gateway_busy: 503,
  unavailable: 503,
};
const TYPES = {
  invalid_request_error: 400,
  authentication_error: 401,
  permission_error: 403,
  rate_limit_error: 429,
  timeout_error: 504,
};

/** The error of an `error` event. Its status is derived from its code or type, because the response began with 200. */
export function refusalOf(error) {
  // an event has no headers: the code shows whether a retry helps
  const headers = new Headers(error.code === "rate_limit_exceeded" ? { "retry-after": "1" } : {});
  return new Refusal(CODES[error.code] ?? TYPES[error.type] ?? 500, error, headers);
}

/** Whether a retry after a delay may succeed. */
export const passes = (error) => error instanceof Unreachable || (error instanceof Refusal && error.passes);

// these refuse the request itself, wherever and whenever it is sent again
const FINAL = [400, 405, 413, 415, 421, 431];
const FINAL_CODES = ["already_exists", "checkpoint_changed", "context_not_found", "model_not_found", "origin"];

/** Whether no retry without changes can succeed. */
export const isFinal = (error) => error instanceof Refusal && (FINAL.includes(error.status) || FINAL_CODES.includes(error.code));

/** Whether the user cancelled it. */
export const isAbort = (error) => error?.name === "AbortError";

export function sentence(error) {
  if (error instanceof Unreachable) return "The service cannot be reached. The page keeps trying, and nothing is lost.";
  if (!(error instanceof Refusal)) return `The page failed: ${error?.message ?? error}. Reload it.`;
  return SENTENCES[error.status]?.(error) ?? `The service reports: ${messageOf(error)}`;
}

const SENTENCES = {
  400: (error) => `The request is invalid: ${messageOf(error)}`,
  401: () => "The service requires a credential.",
  403: (error) => `Your credential does not allow this: ${messageOf(error)} Use another one, or ask the operator of the service.`,
  404: (error) =>
    error.code === "model_not_found" || error.code === "context_not_found"
      ? "This document does not exist. It was deleted or has expired. Add its file again."
      : `Not found: ${messageOf(error)}`,
  409: (error) =>
    error.code === "already_exists"
      ? "This name is taken. Choose another one, or append the file to that document."
      : `This is not possible now: ${messageOf(error)}`,
  410: (error) => `The stored document is damaged: ${messageOf(error)} Add the file again.`,
  413: (error) => `This is too large: ${messageOf(error)}`,
  415: (error) => `This file cannot be read: ${messageOf(error)}`,
  421: () => "The service does not accept this address. Open the page at the address that you received from the operator.",
  429: (error) =>
    error.retryAfter === null
      ? `There is not enough space: ${bare(error)} Delete documents, or wait until some expire.`
      : `The service is busy. ${tryAgain(error)}`,
  502: unavailable,
  503: (error) => (error.code === "gateway_busy" ? busy(error) : unavailable(error)),
  504: () => "The time limit was exceeded. Try again when the load is lower.",
};

/** The gateway has no room now, and the service may be well. */
function busy(error) {
  const reason = messageOf(error);
  return `${reason[0].toUpperCase()}${reason.slice(1)} ${tryAgain(error)}`;
}

const tryAgain = ({ retryAfter }) => `Try again in ${retryAfter === null ? "a moment" : duration(Math.max(1, retryAfter))}.`;

function unavailable(error) {
  if (/does not answer|cannot be reached/.test(error.message)) return "The service cannot be reached. Try again in a moment.";
  return `The service is not available: ${messageOf(error)} Try again in a moment.`;
}

/** The message without the service's advice, which is for API clients. */
const bare = (error) => messageOf({ ...error, message: error.message.replace(/^(window )?pool: /, "").replace(/; delete a context.*$/, "") });

/** The service's message as a sentence, without the field and without options of the operator. */
function messageOf(error) {
  const own = (error.message || `status ${error.status}`).trim();
  const words = own.replace(/^body: /, "").replace(/ \(only serve --allow-long goes beyond it\)/, "");
  return /[.!?]$/.test(words) ? words : `${words}.`;
}
