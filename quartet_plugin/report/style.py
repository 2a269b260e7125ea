"""The report's style: light and dark by the reader's choice, light on paper; nothing is fetched."""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --panel: #f6f7f9; --ink: #1a1f27; --muted: #5d6775; --rule: #dde1e7; --grid: #e9ecf0;
  --accent: #2a6bb5; --soft: #8fb4dd; --good: #1b7f55; --bad: #b3384d; --warn: #a8640a; --idle: #e6e8ec;
  --edge: rgb(0 0 0 / .28);
}
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171c; --panel: #1c2027; --ink: #e6e9ee; --muted: #9aa5b4; --rule: #323944; --grid: #272d36;
  --accent: #6fa8e6; --soft: #3f6490; --good: #4cc38a; --bad: #f0788c; --warn: #e0a458; --idle: #2a3039;
  --edge: rgb(255 255 255 / .3);
} }
@media print { :root {
  --paper: #ffffff; --panel: #ffffff; --ink: #000000; --muted: #444444; --rule: #bbbbbb; --grid: #dddddd;
  --accent: #2a6bb5; --soft: #8fb4dd; --good: #1b7f55; --bad: #b3384d; --warn: #a8640a; --idle: #e6e8ec;
  --edge: rgb(0 0 0 / .28);
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 27px; line-height: 1.25; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 44px 0 10px; padding-top: 14px; border-top: 1px solid var(--rule); }
p { margin: 8px 0; max-width: 82ch; }
.sub, .note, figcaption { color: var(--muted); }
.note, figcaption { font-size: 13px; overflow-wrap: anywhere; }
.verdict { font-size: 19px; margin: 16px 0 4px; }
.verdict strong { color: var(--good); }
.verdict.none strong, .verdict.open strong { color: var(--ink); }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px;
  margin: 22px 0 6px; padding: 0; }
.cards div { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 14px; }
.cards dt { color: var(--muted); font-size: 13px; }
.cards dd { margin: 2px 0 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards small { display: block; font-size: 12.5px; font-weight: 400; color: var(--muted); }
figure { margin: 14px 0 6px; }
figcaption { margin-top: 4px; max-width: 90ch; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr));
  gap: 8px 36px; }
.pair h2 { margin-bottom: 4px; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { fill: var(--ink); font-size: 12px; font-family: inherit; font-variant-numeric: tabular-nums; }
svg .tick { fill: var(--muted); font-size: 11px; }
svg .axis { fill: var(--muted); font-size: 12px; }
svg .grid { stroke: var(--grid); stroke-width: 1; }
svg .reference { stroke: var(--muted); stroke-width: 1.2; stroke-dasharray: 4 4; }
svg .rug { stroke: var(--muted); stroke-width: 1.2; }
svg .stem { stroke: currentColor; stroke-width: 2; }
svg .whisker circle { fill: currentColor; }
svg .baseline, svg .baseline.bar { color: var(--muted); fill: var(--muted); }
svg .won, svg .won.bar { color: var(--good); fill: var(--good); }
svg .other, svg .other.bar { color: var(--accent); fill: var(--accent); }
svg .bar { fill: var(--accent); }
svg .measured { fill: var(--accent); fill-opacity: .82; }
svg .unstable { fill: var(--paper); stroke: var(--accent); stroke-width: 1.6; }
svg .repeat { fill: none; stroke: var(--soft); stroke-width: 1.4; }
svg .top { fill: var(--good); fill-opacity: 1; }
svg .drift { fill: none; stroke: var(--muted); stroke-width: 1.5; }
svg .ring { stroke: var(--good); stroke-width: 1.6; fill: none; }
svg .cross { stroke: var(--bad); stroke-width: 2; fill: none; }
svg .best-line { stroke: var(--good); stroke-width: 1.6; fill: none; opacity: .75; }
svg .idle { fill: var(--idle); }
svg .action { stroke: var(--paper); stroke-width: .6; }
svg .on-dark { fill: #ffffff; font-size: 9px; }
svg .on-light { fill: #000000; font-size: 9px; }
.scroll { overflow-x: auto; background:
  linear-gradient(to right, var(--paper) 40%, transparent) left / 40px 100% no-repeat local,
  linear-gradient(to left, var(--paper) 40%, transparent) right / 40px 100% no-repeat local,
  linear-gradient(to right, var(--edge), transparent) left / 16px 100% no-repeat scroll,
  linear-gradient(to left, var(--edge), transparent) right / 16px 100% no-repeat scroll; }
.scroll:focus-visible, summary:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
summary { cursor: pointer; color: var(--muted); font-size: 13px; margin-top: 8px; }
.natural svg { min-width: 1080px; }
.narrow { display: none; }
@media (max-width: 960px) {
  .wide { display: none; }
  .narrow { display: block; max-width: 720px; }
}
@media (max-width: 640px) {
  main { padding: 24px 16px 48px; }
  figure svg text, figure svg .tick, figure svg .axis { font-size: 14px; }
  .natural svg text { font-size: 12px; }
  .natural svg .tick { font-size: 11px; }
  .natural svg .on-dark, .natural svg .on-light { font-size: 9px; }
}
table { border-collapse: collapse; width: 100%; font-size: 12.5px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { color: var(--muted); font-weight: 500; border-bottom-color: var(--rule); }
th.number, td.number { text-align: right; white-space: nowrap; }
td.plain { white-space: nowrap; }
td.long { min-width: 210px; }
td.reason { overflow-wrap: anywhere; min-width: 260px; }
tr.best td { font-weight: 600; }
tr.faint td { color: var(--muted); }
.tag { border: 1px solid var(--rule); border-radius: 9px; padding: 0 7px; font-size: 12px;
  white-space: nowrap; }
.tag.bad { color: var(--bad); border-color: var(--bad); }
.tag.good { color: var(--good); border-color: var(--good); }
.tag.warn { color: var(--warn); border-color: var(--warn); }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: 10px 14px;
  font-size: 12.5px; line-height: 1.5; white-space: pre-wrap; overflow-wrap: anywhere; }
code, pre { font-family: ui-monospace, "SFMono-Regular", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
ul { padding-left: 20px; }
footer { margin-top: 48px; padding-top: 12px; border-top: 1px solid var(--rule); color: var(--muted);
  font-size: 12.5px; }
@media print {
  main { max-width: none; padding: 0; }
  h2 { break-after: avoid; margin-top: 26px; }
  figure, .cards, tr, pre { break-inside: avoid; }
  .scroll { overflow: visible; background: none; }
  table { font-size: 10.5px; }
}
"""
