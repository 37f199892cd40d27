// The interactive map: pointing at a layer draws its slots, one column per slot, over the epochs.
"use strict";
for (const root of document.querySelectorAll(".slots")) {
  const layers = JSON.parse(root.querySelector("script").textContent).layers;
  const list = root.querySelector(".layers");
  const which = root.querySelector(".which");
  const grid = root.querySelector("svg.grid");
  const names = ["own", "closed", "moved"];
  const count = (line, state) => [...line].filter((letter) => letter === state).length;

  function draw(number) {
    const layer = layers[number];
    const epochs = layer.states.length;
    const slots = layer.states[0].length;
    const cells = [];
    layer.states.forEach((line, epoch) => {
      [...line].forEach((state, slot) => {
        const kind = names[Number(state)];
        cells.push(`<rect class="${kind}" x="${slot + 0.06}" y="${epoch + 0.06}" width=".88" height=".88" ` +
          `data-epoch="${epoch}" data-slot="${slot}"/>`);
      });
    });
    grid.setAttribute("viewBox", `0 0 ${slots} ${epochs}`);
    grid.setAttribute("preserveAspectRatio", "none");
    grid.style.aspectRatio = `${slots} / ${Math.max(epochs, slots / 3)}`;
    grid.innerHTML = cells.join("");
    const last = layer.states[epochs - 1];
    which.textContent = `${layer.name}: ${slots} slots, at the end ${count(last, "2")} re-allocated, ` +
      `${count(last, "1")} closed`;
    which.dataset.text = which.textContent;
    for (const button of list.children) {
      button.setAttribute("aria-selected", String(button === list.children[number]));
    }
    const tell = (epoch, slot) => {
      const state = Number(layer.states[epoch][slot]);
      const words = ["reads its own channel", "is closed",
        `is re-allocated (at the end it reads channel ${layer.source[slot]})`][state];
      which.textContent = `${which.dataset.text}. Epoch ${epoch}: slot ${slot} ${words}.`;
    };
    grid.onpointermove = (event) => {
      const cell = event.target.dataset;
      if (cell.slot !== undefined) tell(cell.epoch, cell.slot);
    };
    // With the keyboard: a cursor that starts at the last epoch of slot 0.
    let at = [epochs - 1, 0];
    grid.onfocus = () => tell(...at);
    grid.onkeydown = (event) => {
      const steps = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
      const step = steps[event.key];
      if (!step) return;
      event.preventDefault();
      const ends = [epochs - 1, slots - 1];
      at = at.map((value, axis) => Math.min(Math.max(value + step[axis], 0), ends[axis]));
      tell(...at);
    };
  }

  layers.forEach((layer, number) => {
    const button = document.createElement("button");
    button.setAttribute("role", "option");
    button.tabIndex = 0;
    const last = layer.states[layer.states.length - 1];
    const moved = document.createElement("span");
    moved.textContent = `${count(last, "2")} / ${last.length}`;
    button.append(layer.name, moved);
    button.onpointerenter = button.onfocus = button.onclick = () => draw(number);
    button.onkeydown = (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step && list.children[number + step]) {
        event.preventDefault();
        list.children[number + step].focus();
      }
    };
    list.append(button);
  });
  const busiest = layers.map((layer) => count(layer.states.at(-1), "2") + count(layer.states.at(-1), "1"));
  draw(busiest.indexOf(Math.max(...busiest)));
}
