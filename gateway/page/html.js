// Templates and hooks for all components.
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render } from "./vendor/preact.js";
export { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";

// Values become text nodes and properties, never markup, so texts of documents and models cannot inject HTML.
export const html = htm.bind(h);
