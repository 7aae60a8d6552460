// A modal dialog: the browser's own, which keeps the focus inside and gives it back.
import { html, useLayoutEffect, useRef } from "./html.js";

let count = 0;

/** `onClose` is called however it closes; what it asks is submitted by `onSubmit`. */
export function Dialog({ title, onClose, onSubmit, children }) {
  const element = useRef(null);
  const id = useRef(`dialog-${(count += 1)}`).current; // one may be asked for a credential above another dialog
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
  return html`<dialog ref=${element} aria-labelledby=${id} onCancel=${(event) => {
    event.preventDefault();
    onClose();
  }}>
    <form onSubmit=${submit} novalidate>
      <h2 id=${id}>${title}</h2>
      ${children}
    </form>
  </dialog>`;
}
