// Small pictures to hide, drawn here: side x side colours, row by row.

import { coloursOf, disc } from "./drawing.js";

function painted(draw) {
  return (side) => {
    const canvas = new OffscreenCanvas(side, side);
    const context = canvas.getContext("2d");
    context.scale(side / 32, side / 32);
    draw(context);
    return coloursOf(context, side);
  };
}

function fill(context, style, ...corners) {
  context.fillStyle = style;
  context.beginPath();
  for (const corner of corners) context.lineTo(...corner);
  context.fill();
}

function fade(context, from, to, ...stops) {
  const style = context.createLinearGradient(0, from, 0, to);
  stops.forEach((own, index) => style.addColorStop(index / (stops.length - 1), own));
  context.fillStyle = style;
  context.fillRect(0, from, 32, to - from);
}

export const scenes = {
  ship: painted((context) => {
    fade(context, 0, 20, "#9cc3e4", "#dbe8f0");
    fade(context, 20, 32, "#3f7195", "#1f4766");
    fill(context, "#8f2f2a", [3, 18], [29, 18], [26, 24], [6, 24]);
    fill(context, "#f3f1ea", [9, 13], [23, 13], [23, 18], [9, 18]);
    fill(context, "#c8ccd0", [16, 6], [19, 6], [19, 13], [16, 13]);
    fill(context, "#33485a", [11, 15], [21, 15], [21, 16], [11, 16]);
  }),
  car: painted((context) => {
    fade(context, 0, 15, "#c9d6df", "#e6e8e6");
    fade(context, 15, 22, "#6f8f5b", "#5e7a4c");
    fade(context, 22, 32, "#777a7d", "#5d6063");
    fill(context, "#c62f2b", [2, 18], [8, 17], [12, 12], [22, 12], [26, 17], [30, 19], [30, 25], [2, 25]);
    fill(context, "#33414c", [10, 17], [13, 13], [21, 13], [24, 17]);
    disc(context, "#1b1d1f", 8, 25, 3.2);
    disc(context, "#1b1d1f", 24, 25, 3.2);
    disc(context, "#b9bdc0", 8, 25, 1.2);
    disc(context, "#b9bdc0", 24, 25, 1.2);
  }),
  sunset: painted((context) => {
    fade(context, 0, 22, "#3c3a6e", "#b9546b", "#f5a65b");
    disc(context, "#ffe9b0", 20, 19, 4);
    fade(context, 22, 32, "#a4574f", "#2c2742");
    fill(context, "#241f33", [0, 22], [5, 16], [9, 20], [13, 17], [17, 22]);
  }),
};
