// Errors as sentences, each with what to do.
import { Refusal, Unreachable } from "./errors.js";
import { duration } from "./format.js";

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
      ? `There is no room: ${told(error)} Delete what you no longer need, or wait until something expires.`
      : `The service is busy. It can be tried again in ${duration(Math.max(1, error.retryAfter))}.`,
  502: () => UNAVAILABLE,
  503: () => UNAVAILABLE,
  504: () => "This took longer than it may. Try again when less is going on.",
};

const UNAVAILABLE = "The service is not ready. The page tries again by itself.";

/** The service's own words, as a sentence. */
function told(error) {
  const words = (error.message || `status ${error.status}`).trim();
  return /[.!?]$/.test(words) ? words : `${words}.`;
}
