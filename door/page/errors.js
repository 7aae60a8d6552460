// What calls end with when they do not succeed.

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

/** An `error` event: its status is in its type, since that of the response was sent long before. */
export function refusalOf(error) {
  const statuses = {
    invalid_request_error: 400,
    authentication_error: 401,
    permission_error: 403,
    not_found_error: 404,
    rate_limit_error: 429,
  };
  const byCode = { context_not_found: 404, model_not_found: 404, already_exists: 409, wrong_offset: 409 };
  return new Refusal(byCode[error.code] ?? statuses[error.type] ?? 500, error);
}

/** Whether waiting and trying again is all that can be done, and may help. */
export const passes = (error) => error instanceof Unreachable || (error instanceof Refusal && error.passes);

/** Whether the reader ended it. */
export const isAbort = (error) => error?.name === "AbortError";
