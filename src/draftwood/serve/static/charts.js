// Small charts: a line of acceptance, bars of all rounds, the parts of a round's time.

import { svg } from "./tree.js";

/** Accepted over proposed in the rounds up to each, over a window; null where nothing was guessed. */
export function acceptance(rounds, window = 12) {
  return rounds.map((_, i) => {
    const last = rounds.slice(Math.max(0, i + 1 - window), i + 1);
    const guesses = last.reduce((sum, r) => sum + r.tokens.length - 1, 0);
    return guesses ? last.reduce((sum, r) => sum + r.path.length - 1, 0) / guesses : null;
  });
}

/** A line from 0 (bottom) to 1 (top). */
export function drawLine(element, values) {
  const last = values.slice(-60);
  const step = 100 / Math.max(last.length - 1, 1);
  const points = last
    .map((value, i) => (value === null ? null : `${(i * step).toFixed(1)},${(28 - 26 * value).toFixed(1)}`))
    .filter(Boolean);
  element.setAttribute("viewBox", "0 0 100 30");
  element.setAttribute("preserveAspectRatio", "none");
  element.replaceChildren(svg("polyline", {
    points: points.join(" "), fill: "none", stroke: "currentColor", "stroke-width": 2,
    "vector-effect": "non-scaling-stroke", "stroke-linejoin": "round",
  }));
}

/** A bar for each round: accepted guesses below, the model's own token on top. */
export function drawHistory(element, rounds, chosen) {
  const most = Math.max(2, ...rounds.map((r) => r.new_tokens));
  const unit = 60 / most;
  const width = Math.max(rounds.length, 24);
  const bars = rounds.flatMap((round, i) => {
    const right = Math.min(round.path.length - 1, round.new_tokens);
    const own = round.new_tokens - right;
    const bar = (name, from, count) => svg("rect", {
      class: name, x: i + 0.1, width: 0.8, y: 62 - (from + count) * unit, height: count * unit,
    });
    return [
      ...(i === chosen ? [svg("rect", { class: "chosen", x: i, y: 0, width: 1, height: 64 })] : []),
      bar("right", 0, right), bar("own", right, own),
    ];
  });
  element.setAttribute("viewBox", `0 0 ${width} 64`);
  element.replaceChildren(...bars);
}

/** Draft, target, rest, side by side. */
export function drawTime(element, round) {
  const total = round.total_s || 1;
  const rest = Math.max(total - round.draft_s - round.target_s, 0);
  let x = 0;
  const parts = [["draft", round.draft_s], ["target", round.target_s], ["rest", rest]];
  element.setAttribute("viewBox", "0 0 100 10");
  element.replaceChildren(...parts.map(([name, seconds]) => {
    const width = (100 * seconds) / total;
    x += width;
    return svg("rect", { class: `part-${name}`, x: x - width, y: 0, width, height: 10 });
  }));
}

/** The same in words. */
export function timeInWords(round) {
  const ms = (seconds) => `${(1000 * seconds).toFixed(1)} ms`;
  const rest = Math.max(round.total_s - round.draft_s - round.target_s, 0);
  return `${ms(round.total_s)}: guessing ${ms(round.draft_s)}, the model's forward `
    + `${ms(round.target_s)}, walking and keeping ${ms(rest)}`;
}
