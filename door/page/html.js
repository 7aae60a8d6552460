// Templates and hooks: what every component is written with, imported from here alone.
import { h } from "./vendor/preact.js";
import htm from "./vendor/htm.js";

export { render } from "./vendor/preact.js";
export { useEffect, useLayoutEffect, useRef, useState } from "./vendor/hooks.js";

// Values become text nodes and properties, never markup: whatever a document or a model says stays text.
export const html = htm.bind(h);
