// The current time, for ages and remaining times.
import { Store, useStore } from "./store.js";

const seconds = new Store(Date.now() / 1000);
const EVERY = 1000;

setInterval(() => document.hidden || seconds.set(Date.now() / 1000), EVERY);

/** Seconds since the epoch. A component that uses it is rendered every second. */
export const useNow = () => useStore(seconds);
