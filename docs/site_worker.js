// Search without a server: browsers start no workers for pages that are opened from a folder. There, a hidden frame
// does the worker's work. The theme would fetch a script for this from the network.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open()
      inside.document.write("<!doctype html><script></script>")
      inside.document.close()
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      // Each script is loaded after the one before it; importScripts returns a promise, which the theme awaits.
      inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve())
      this.load(url).then(() => {
        this.ready = true
        this.waiting.splice(0).forEach((data) => this.postMessage(data))
      })
    }

    load(url) {
      const { document: page } = this.frame.contentWindow
      return new Promise((resolve, reject) => {
        const script = page.createElement("script")
        script.src = new URL(url, location.href).href
        script.onload = resolve
        script.onerror = () => reject(new Error(`${script.src} cannot be loaded`))
        page.body.appendChild(script)
      })
    }

    postMessage(data) {
      if (!this.ready) return void this.waiting.push(data)
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
