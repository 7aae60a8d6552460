// The time of day, for what says how old it is or how long it still takes.
import { Store, useStore } from "./store.js";

const seconds = new Store(Date.now() / 1000);
const EVERY = 1000;

setInterval(() => document.hidden || seconds.set(Date.now() / 1000), EVERY);

/** Seconds since the epoch; who uses it is rendered every second. */
export const useNow = () => useStore(seconds);
