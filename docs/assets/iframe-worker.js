// Search when the site is opened as files: browsers refuse workers on file://, so run the search script in a hidden frame.
// The theme looks for the name IFrameWorker, and the offline plugin for "iframe-worker" in the name of this file.
(() => {
  if (location.protocol !== "file:") return;
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      const load = (address) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          script.src = address;
          script.onload = done;
          script.onerror = failed;
          inside.document.body.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...addresses) => addresses.reduce((before, next) => before.then(() => load(next)), Promise.resolve());
      this.frame = frame;
      this.ready = load(new URL(url, location.href).href);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
})();
