// A modal dialog, based on the browser's <dialog>, which restores the focus.
import { html, useLayoutEffect, useRef } from "./html.js";

let count = 0;

/** `onSubmit` is called for the form, `onClose` for every way to close. */
export function Dialog({ title, onClose, onSubmit, children }) {
  const element = useRef(null);
  const id = useRef(`dialog-${(count += 1)}`).current; // the credential form may open above another dialog
  useLayoutEffect(() => {
    const { current: dialog } = element;
    const before = document.activeElement;
    dialog.showModal();
    return () => {
      dialog.close();
      // the focused element may have been removed
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
