// Server-sent events of a response. EventSource supports neither POST nor headers.
import { Unreachable } from "./errors.js";

/** Yields {type, data, comment}: `type` is "message" unless the event names one, `comment` has neither. */
export async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let event = { type: "message", data: [] };
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines.map((each) => each.replace(/\r$/, ""))) {
        if (line === "") {
          if (event.data.length) yield { type: event.type, data: event.data.join("\n") };
          event = { type: "message", data: [] };
        } else if (line.startsWith(":")) yield { comment: line.slice(1).trim() };
        else if (line.startsWith("data:")) event.data.push(line.slice(5).replace(/^ /, ""));
        else if (line.startsWith("event:")) event.type = line.slice(6).trim();
      }
    }
  } finally {
    // closes the connection as soon as the reader stops
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("the connection broke");
  }
}
