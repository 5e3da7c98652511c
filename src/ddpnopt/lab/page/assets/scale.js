// Axes: where a value stands, which values to write along the axis, and how.
const ddpScale = (() => {
  const nice = (span, count) => {
    const raw = span / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999) * power;
    return step;
  };
  const format = (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  };
  const linear = (low, high, from, to, count) => {
    if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
    const step = nice(high - low, count);
    const ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) ticks.push(Number((k * step).toPrecision(12)));
    return { at: (v) => from + (v - low) / (high - low) * (to - from), ticks };
  };
  const log = (low, high, from, to, count) => {
    if (low === high) { low /= 2; high *= 2; }
    const [a, b] = [Math.log10(low), Math.log10(high)];
    const every = Math.max(1, Math.ceil((b - a) / Math.max(count, 1)));
    let ticks = [];
    for (let k = Math.ceil(a - 1e-9); k <= b + 1e-9; k++) if (k % every === 0) ticks.push(10 ** k);
    if (ticks.length < 2) {
      ticks = [];
      for (let k = Math.floor(a); k <= b; k++) for (const m of [1, 2, 5]) { const v = m * 10 ** k; if (v >= low * 0.999 && v <= high * 1.001) ticks.push(v); }
    }
    return { at: (v) => from + (Math.log10(v) - a) / (b - a) * (to - from), ticks };
  };
  const names = (values, from, to) => {
    const width = (to - from) / values.length;
    return { at: (v) => from + (values.indexOf(v) + 0.5) * width, ticks: values, width };
  };
  return { linear, log, names, format };
})();
