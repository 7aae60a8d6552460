// A modal dialog: the browser's own, which keeps the focus inside and gives it back.
import { html, useLayoutEffect, useRef } from "./html.js";

/** `onClose` is called however it closes; what it asks is submitted by `onSubmit`. */
export function Dialog({ title, onClose, onSubmit, children }) {
  const element = useRef(null);
  useLayoutEffect(() => {
    const { current: dialog } = element;
    const before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close();
      // what had the focus may be gone with what was done
      (before?.isConnected ? before : document.querySelector("main h1, main h2"))?.focus();
    };
  }, []);
  const submit = (event) => {
    event.preventDefault();
    onSubmit?.();
  };
  return html`<dialog ref=${element} aria-labelledby="dialog-title" onCancel=${(event) => {
    event.preventDefault();
    onClose();
  }}>
    <form onSubmit=${submit} novalidate>
      <h2 id="dialog-title">${title}</h2>
      ${children}
    </form>
  </dialog>`;
}
