// The search runs in a Worker, which browsers refuse to a page from the disk. There, run it in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      this.loaded = new Promise((resolve) => {
        frame.onload = () => {
          frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
          resolve(frame.contentWindow);
        };
      });
      frame.hidden = true;
      frame.srcdoc = `<script src="${url}"></script>`;
      document.body.append(frame);
    }

    postMessage(data) {
      this.loaded.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
