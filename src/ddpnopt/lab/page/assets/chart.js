// A chart with a read-out: by pointer, by finger, and by the arrow keys.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const { linear, log, names, format } = ddpScale;
  const make = (tag, attributes = {}, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const html = (tag, properties = {}, ...children) => {
    const node = Object.assign(document.createElement(tag), properties);
    node.append(...children);
    return node;
  };
  const tint = (node, colour) => { node.classList.add("tint"); node.style.setProperty("--c", colour); return node; };

  class Chart {
    constructor(box) {
      this.box = box;
      this.panels = JSON.parse(document.getElementById(box.dataset.chart).textContent).panels;
      this.panel = this.panels[0];
      this.off = new Set();
      this.index = null;
      this.controls = box.appendChild(html("div", { className: "controls" }));
      this.plot = box.appendChild(html("div", { className: "plot", tabIndex: 0 }));
      this.plot.setAttribute("role", "group");
      this.plot.setAttribute("aria-roledescription", "chart");
      this.plot.setAttribute("aria-label", `${box.dataset.caption} Arrow keys read values.`);
      this.legend = box.appendChild(html("ul", { className: "legend" }));
      this.readout = this.plot.appendChild(html("div", { className: "readout", hidden: true }));
      this.spoken = box.appendChild(html("p", { className: "unseen" }));
      this.spoken.setAttribute("aria-live", "polite");
      this.makeControls();
      this.choose(0);
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.plot);
    }

    makeControls() {
      if (this.panels.length > 1) {
        const id = `${this.box.dataset.chart}-panel`;
        const select = html("select", { id });
        this.panels.forEach((panel, k) => select.append(html("option", { value: k, textContent: panel.name || `panel ${k + 1}` })));
        select.addEventListener("change", () => this.choose(Number(select.value)));
        this.controls.append(html("span", { className: "choose" }, html("label", { htmlFor: id, textContent: "Show" }), select));
      }
      this.toggle = html("button", { type: "button", className: "toggle", textContent: "Logarithmic" });
      this.toggle.addEventListener("click", () => { this.panel.logY = !this.panel.logY; this.draw(); });
      this.controls.append(this.toggle);
    }

    choose(k) {
      this.panel = this.panels[k];
      this.index = null;
      const { lines, kind } = this.panel;
      const all = lines.flatMap((line) => line.x).filter((x) => x !== null);
      this.places = kind === "names" ? [...new Set(all)] : [...new Set(all)].sort((a, b) => a - b);
      this.legend.replaceChildren(...lines.map((line) => {
        const button = tint(html("button", { type: "button" }, html("i"), line.label), line.colour);
        button.addEventListener("click", () => {
          if (this.off.has(line.label)) this.off.delete(line.label); else this.off.add(line.label);
          this.draw();
        });
        return html("li", {}, button);
      }));
      this.draw();
    }

    shown() { return this.panel.lines.filter((line) => !this.off.has(line.label)); }

    scales(width, height) {
      const { kind, logX } = this.panel;
      const lines = this.shown().length ? this.shown() : this.panel.lines;
      const values = lines.flatMap((line) => line.y.flatMap((y, k) => {
        const spread = line.spread?.[k] ?? 0;
        return y === null ? [] : [y - spread, y + spread];
      }));
      const middles = lines.flatMap((line) => line.y).filter((y) => y !== null);
      const positive = middles.length > 0 && Math.min(...middles) > 0;
      this.logY = this.panel.logY && positive;
      this.toggle.hidden = !positive;
      this.toggle.setAttribute("aria-pressed", String(this.logY));
      let low = Math.min(...values), high = Math.max(...values);
      if (!values.length) [low, high] = [0, 1];
      if (this.logY) low = Math.max(low, Math.min(...middles) / 3);
      else { const pad = (high - low) * 0.05; low = positive && low - pad < 0 ? 0 : low - pad; high += pad; }
      this.floor = low;
      const rows = Math.max(3, Math.round(height / 60));
      const longest = Math.max(...this.places.map((place) => String(place).length)) * 6.8;
      this.tilted = kind === "names" && longest > (width - 60) / this.places.length;
      this.foot = 30 + (this.tilted ? Math.min(longest, 110) * 0.6 : 0) + (this.panel.x ? 18 : 0);
      const y = (this.logY ? log : linear)(low, high, height - this.foot, 16, rows);
      const widest = Math.max(...y.ticks.map((v) => format(v).length), 2);
      const left = 18 + widest * 7 + (this.panel.y ? 20 : 0);
      const columns = Math.max(2, Math.floor((width - left) / 90));
      const x = kind === "names" ? names(this.places, left, width - 16)
        : (logX ? log : linear)(this.places[0], this.places.at(-1), left, width - 20, columns);
      const own = logX && this.places.length <= Math.min(10, columns + 3);
      if (own) x.ticks = this.places;  // a grid of rates is read at its own values
      return { x, y, left };
    }

    draw() {
      const width = Math.max(this.plot.clientWidth, 240);
      const height = width < 520 ? 280 : 360;
      const { x, y, left } = this.scales(width, height);
      this.x = x;
      const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
      for (const tick of y.ticks) {
        svg.append(make("line", { class: "grid", x1: left, x2: width - 16, y1: y.at(tick), y2: y.at(tick) }));
        svg.append(make("text", { x: left - 8, y: y.at(tick) + 4, "text-anchor": "end" }, format(tick)));
      }
      const under = height - this.foot + 18;
      for (const tick of x.ticks) {
        const whole = typeof tick === "string" ? tick : format(tick);
        const text = whole.length > 17 ? `${whole.slice(0, 16)}…` : whole;
        const place = this.tilted ? { transform: `translate(${x.at(tick) + 4} ${under - 4}) rotate(-38)`, "text-anchor": "end" }
          : { x: x.at(tick), y: under, "text-anchor": "middle" };
        svg.append(make("text", place, text));
      }
      if (this.panel.x) svg.append(make("text", { x: (left + width) / 2, y: height - 8, "text-anchor": "middle" }, this.panel.x));
      if (this.panel.y) svg.append(make("text", { transform: `translate(16 ${(height - 30) / 2}) rotate(-90)`, "text-anchor": "middle" }, this.panel.y));
      const lines = this.shown();
      // side by side where several lines have the same name below them; else each dot stands over its own
      const named = lines.flatMap((line) => line.x), beside = new Set(named).size < named.length;
      lines.forEach((line, k) => {
        const group = tint(make("g"), line.colour);
        if (this.panel.kind === "names") this.drawNames(group, line, x, y, beside ? (k - (lines.length - 1) / 2) / lines.length : 0);
        else this.drawLine(group, line, x, y);
        svg.append(group);
      });
      this.cross = svg.appendChild(make("g"));
      this.plot.querySelector("svg")?.remove();
      this.plot.prepend(svg);
      [...this.legend.querySelectorAll("button")].forEach((button, k) =>
        button.setAttribute("aria-pressed", String(!this.off.has(this.panel.lines[k].label))));
      this.state = { x, y, width, height };
      this.show(this.index, false);
    }

    drawLine(group, line, x, y) {
      const clamp = (v) => y.at(Math.max(v, this.floor));
      const runs = [[]];
      line.x.forEach((place, k) => {
        if (place === null || line.y[k] === null || (this.panel.logX && place <= 0)) runs.push([]);
        else runs.at(-1).push({ px: x.at(place), v: line.y[k], s: line.spread?.[k] ?? 0 });
      });
      for (const run of runs.filter((each) => each.length)) {
        if (line.spread) {
          const upper = run.map((p) => `${p.px},${clamp(p.v + p.s)}`), lower = run.map((p) => `${p.px},${clamp(p.v - p.s)}`).reverse();
          group.append(make("polygon", { class: "band", points: [...upper, ...lower].join(" ") }));
        }
        group.append(make("polyline", { class: "line", points: run.map((p) => `${p.px},${y.at(p.v)}`).join(" ") }));
        if (run.length <= 12) for (const p of run) group.append(make("circle", { class: "dot", cx: p.px, cy: y.at(p.v), r: 4 }));
      }
    }

    drawNames(group, line, x, y, shift) {
      line.x.forEach((place, k) => {
        const v = line.y[k], s = line.spread?.[k] ?? 0;
        if (place === null || v === null) return;
        const px = x.at(place) + shift * x.width * 0.7;
        if (s) group.append(make("line", { class: "whisker", x1: px, x2: px, y1: y.at(Math.max(v - s, this.floor)), y2: y.at(v + s) }));
        group.append(make("circle", { class: "dot", cx: px, cy: y.at(v), r: 5 }));
      });
    }

    show(index, aloud = true) {
      this.index = index;
      this.cross.replaceChildren();
      this.readout.hidden = index === null || !this.shown().length;
      if (this.readout.hidden) { if (aloud) this.spoken.textContent = ""; return; }
      const { x, y, width, height } = this.state;
      const place = this.places[index];
      const px = x.at(place);
      this.cross.append(make("line", { class: "cross", x1: px, x2: px, y1: 16, y2: height - this.foot }));
      const rows = this.shown().flatMap((line) => {
        const k = line.x.indexOf(place);
        return k < 0 || line.y[k] === null ? [] : [{ line, v: line.y[k], s: line.spread?.[k] ?? null }];
      }).sort((a, b) => b.v - a.v);
      const at = typeof place === "string" ? place : `${this.panel.x || "x"} = ${format(place)}`;
      const cell = ({ v, s }) => format(v) + (s === null ? "" : ` ± ${format(s)}`);
      if (this.panel.kind !== "names")
        for (const { line, v } of rows) this.cross.append(tint(make("circle", { class: "dot", cx: px, cy: y.at(v), r: 5 }), line.colour));
      const table = html("table", {}, html("caption", { textContent: at }));
      for (const row of rows) table.append(html("tr", {}, html("th", { scope: "row" }, tint(html("i"), row.line.colour), row.line.label), html("td", { textContent: cell(row) })));
      this.readout.replaceChildren(table);
      const scale = this.plot.clientWidth / width;
      const right = px * scale + 14 + this.readout.offsetWidth > this.plot.clientWidth;
      const leftwards = px * scale - 14 - this.readout.offsetWidth;
      this.readout.style.left = `${right ? Math.max(leftwards, 4) : px * scale + 14}px`;
      this.readout.style.top = "14px";
      if (aloud) this.spoken.textContent = `${at}: ${rows.map((row) => `${row.line.label} ${cell(row)}`).join("; ")}`;
    }

    listen() {
      const near = (event) => {
        const box = this.plot.getBoundingClientRect();
        const px = (event.clientX - box.left) * this.state.width / box.width;
        const far = this.places.map((place) => Math.abs(this.x.at(place) - px));
        return far.indexOf(Math.min(...far));
      };
      const follow = (event) => { const k = near(event); if (k !== this.index) this.show(k, false); };
      this.plot.addEventListener("pointermove", follow);
      this.plot.addEventListener("pointerdown", follow);
      this.plot.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") this.show(null); });
      this.plot.addEventListener("blur", () => this.show(null));
      this.plot.addEventListener("keydown", (event) => {
        const last = this.places.length - 1;
        const now = this.index;
        const next = { ArrowRight: now === null ? 0 : Math.min(now + 1, last), ArrowLeft: now === null ? last : Math.max(now - 1, 0), Home: 0, End: last, Escape: null }[event.key];
        if (next === undefined) return;
        event.preventDefault();
        this.show(next);
      });
    }
  }

  for (const box of document.querySelectorAll("[data-chart]")) {
    new Chart(box);
    const printed = box.closest("figure").querySelector(".asprinted");
    if (printed) printed.open = false;  // the chart says the same, and more
  }
})();
