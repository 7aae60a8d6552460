// All uploads of this tab. One sends at a time. Their data survives a reload in sessionStorage. Those that left out files
// stay until they are dismissed.
import { say } from "./announcer.js";
import { endUpload } from "./api.js";
import { contexts } from "./contexts.js";
import { stemOf } from "./files.js";
import { open, opened } from "./route.js";
import { Store } from "./store.js";
import { Upload } from "./upload.js";

const KEPT = "longleaf.uploads";

class Uploads {
  store = new Store([]);
  #line = Promise.resolve();

  /** The names of the documents that are being uploaded. */
  get ids() {
    return this.store.value.filter(({ store }) => store.value.phase !== "done").map(({ what }) => what.id);
  }

  /** Adds uploads of files with their chosen names: [{file, name, size, type, id, append}]. */
  add(wanted) {
    const made = wanted.map(({ file, name, size, type, id, append }) => {
      const what = { id, append, uploadId: randomId(), title: titleOf(name), fileName: name, size, type };
      return new Upload(what, file, { isNew: true });
    });
    this.store.set([...this.store.value, ...made]);
    this.#keep();
    for (const upload of made) this.#start(upload);
  }

  /** Resumes uploads after a reload. */
  resume() {
    const kept = read().map((what) => new Upload(what));
    this.store.set(kept);
    for (const upload of kept) this.#start(upload);
  }

  /** Retries an upload, with the file chosen again or another name. */
  again(upload, { file = upload.file, ...changes } = {}) {
    upload.stop();
    const other = new Upload({ ...upload.what, ...changes }, file);
    this.store.set(this.store.value.map((each) => (each === upload ? other : each)));
    this.#keep();
    this.#start(other);
  }

  /** Cancels an upload, unless it has become a document. */
  async cancel(upload) {
    const { what, file, store } = upload;
    // the service does not know an upload that has not started
    const isKnown = store.value.phase !== "queued" || !file;
    upload.stop();
    store.patch({ phase: "stopping" });
    try {
      if (isKnown) await endUpload(what);
    } catch (error) {
      if (error.status !== 404) {
        store.patch({ phase: "failed", error });
        return;
      }
    }
    say(`Stopped ${what.fileName}.`);
    this.drop(upload);
    contexts.refresh();
  }

  drop(upload) {
    upload.stop();
    this.store.set(this.store.value.filter((each) => each !== upload));
    this.#keep();
  }

  #start(upload) {
    this.#line = this.#line.then(() => {
      if (!this.store.value.includes(upload)) return null;
      this.#watch(upload);
      upload.run();
      return upload.sent;
    });
  }

  #watch(upload) {
    let quarter = 0;
    const { fileName } = upload.what;
    const unfollow = upload.store.follow(({ phase, context, leftOut, processed, total }) => {
      if (phase === "done") {
        unfollow();
        say(`${fileName} is ready.${leftOut.length ? " Some files were left out: the list of uploads names them." : ""}`);
        contexts.put(context.id, context);
        if (!opened.value) open(context.id);
        if (leftOut.length) this.#keep();
        else this.drop(upload);
      } else if (phase === "failed") this.#keep();
      else if (phase === "file") say(`Choose ${fileName} again to continue.`);
      else if (total && Math.floor((4 * processed) / total) > quarter) {
        quarter = Math.floor((4 * processed) / total);
        say(`${fileName}: ${25 * quarter} % read.`);
      }
    });
  }

  #keep() {
    try {
      const going = this.store.value.filter(({ store: { value: { phase, error } } }) => phase !== "done" && (phase !== "failed" || mayGoOn(error)));
      sessionStorage.setItem(KEPT, JSON.stringify(going.map(({ what }) => what)));
    } catch {
      // storage may be forbidden: uploads then do not survive a reload
    }
  }
}

function read() {
  try {
    return JSON.parse(sessionStorage.getItem(KEPT) ?? "[]");
  } catch {
    return [];
  }
}

// after a reload, permanent errors are not retried, except a missing credential
const mayGoOn = ({ status }) => status === 401;

// crypto.randomUUID is only there in secure contexts, which plain HTTP in a local network is not
const randomId = () => [...crypto.getRandomValues(new Uint8Array(16))].map((each) => each.toString(16).padStart(2, "0")).join("");

const titleOf = (fileName) => stemOf(fileName).slice(0, 200);

export const uploads = new Uploads();
