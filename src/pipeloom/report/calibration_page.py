"""Predicted and measured times of a calibration's validation set, as one offline page."""

from __future__ import annotations

from pipeloom.emulator import Calibration, mean_error
from pipeloom.errors import visible_line


def calibration_page(calibration: Calibration) -> str:
    """Draw a page with one point per operator, layer and message; predictions on the diagonal are exact.

    Times are in milliseconds on logarithmic axes.
    """
    from bokeh.models.annotations.labels import Title
    from bokeh.models.text import PlainText
    from bokeh.plotting import figure

    from pipeloom.report.bokeh_page import bokeh_page

    title = (
        f"{calibration.device.name}: mean error {mean_error(calibration.operators):.1%} over operators, "
        f"{calibration.mean_layer_error:.1%} over layers, none of them fitted"
    )
    plot = figure(
        # Plain text, since a device name could contain a formula.
        title=Title(text=PlainText(text=visible_line(title))),
        x_axis_type="log",
        y_axis_type="log",
        x_axis_label="measured, ms",
        y_axis_label="predicted, ms",
        width=900,
        height=700,
        tooltips=[("", "@name"), ("measured", "@x ms"), ("predicted", "@y ms"), ("error", "@error")],
    )
    rows = [*calibration.operators, *calibration.layers, *calibration.links]
    ends = [min(r.measured_s for r in rows) * 1e3 / 2, max(r.measured_s for r in rows) * 1e3 * 2]
    plot.line(ends, ends, color="#9aa1ad", line_dash="dashed")
    for kind, some, color in (
        ("operators", calibration.operators, "#365f9c"),
        ("layers", calibration.layers, "#c0722b"),
        ("messages and collectives", calibration.links, "#4f8a4c"),
    ):
        if not some:
            continue
        source = {
            "x": [row.measured_s * 1e3 for row in some],
            "y": [row.predicted_s * 1e3 for row in some],
            "name": [visible_line(row.name) for row in some],
            "error": [f"{row.error:+.1%}" for row in some],
        }
        plot.scatter("x", "y", source=source, color=color, size=8, legend_label=kind)
    plot.legend.location = "top_left"
    return bokeh_page(plot, "Calibration")
