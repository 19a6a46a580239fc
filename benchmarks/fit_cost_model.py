"""Fits the cost model's constants to a file of published runs, all rows at once, and cross-validates.

`python -m benchmarks.fit_cost_model --file published_runs.json [--write] [--cv out.json]`

Free are the efficiency curves of device families and the constants of `StepConstants`, nothing per model or row. The
loss is a robust one on log(predicted / measured) (iteratively reweighted Gauss-Newton in the logarithms of the
constants, numerical Jacobian, a weak prior at the starting values), each group weighted by the inverse root of its rows
so that no report dominates. Cross-validation leaves out one group (source) at a time and refits on the linearised
model; the left-out rows are then predicted by the model itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from autopar.cluster.device import EfficiencyCurve, device_preset, load_data, preset_key
from autopar.costmodel.estimator.rows import estimate_row
from autopar.costmodel.software import StepConstants

ROOT = Path(__file__).resolve().parent.parent
CURVES = ROOT / "autopar" / "cluster" / "data" / "efficiency.json"
CONSTANTS = ROOT / "costmodel" / "estimator" / "data" / "step.json"
Params = dict[str, float]

PRIOR: Params = {
    "v100.matmul": 0.73,
    "a100.matmul": 0.73,
    "a100.attention": 0.45,
    "h100.matmul": 0.69,
    "h100.matmul8": 0.65,
    "h100.attention": 0.6,
    "h100.attention_eager": 0.25,
    "h100-500w.matmul": 0.49,
    "h100-500w.matmul8": 0.42,
    "gb200.matmul": 0.58,
    "gb200.matmul8": 0.53,
    "gb200.matmul4": 0.43,
    "gb200.attention": 0.6,
    "gb300.matmul8": 0.74,
    "gb300.matmul4": 0.44,
    "half_dim": 100.0,
    "fused_passes": 1.5,
    "eager_passes": 1.7,
    "fp8_cast": 1.2,
    "mx_cast": 1.3,
    "grouped_share": 0.81,
    "permute_passes": 3.7,
    "dense_host_s": 0.0015,
    "moe_host_s": 0.004,
    "expert_host_s": 0.0003,
    "tp_exposed": 0.39,
    "cp_exposed": 0.27,
    "ep_exposed": 0.76,
    "dp_exposed": 0.13,
    "zero3_exposed": 0.11,
    "jitter": 0.0042,
    "step_overhead_s": 0.014,
}
"""Where the fit starts, and what it is weakly held to: rounded values of earlier fits, all physically plausible."""


def curves_of(params: Params) -> dict[str, EfficiencyCurve]:
    """Curves of every family: free values, and ties between relatives that have too few rows of their own.

    B200 shares GB200's; GB300 differs by one factor except for its 4-bit products; H100-500W by its products.
    """
    raw = load_data("efficiency.json")["curves"]
    curves = {name: dict(values) for name, values in raw.items()}
    for key, value in params.items():
        family, _, what = key.partition(".")
        if what:
            curves[family][what] = value
    h100, slow, gb200, gb300, b200 = (curves[k] for k in ("h100", "h100-500w", "gb200", "gb300", "b200"))
    ratio = slow["matmul"] / h100["matmul"]
    slow["attention"], slow["attention_eager"] = h100["attention"] * ratio, h100["attention_eager"] * ratio
    gb200["attention_eager"] = gb200["attention"]
    faster = gb300["matmul8"] / gb200["matmul8"]
    gb300["matmul"] = gb200["matmul"] * faster
    gb300["attention"] = gb300["attention_eager"] = gb200["attention"] * faster
    for what in ("matmul", "matmul8", "matmul4", "attention", "attention_eager"):
        b200[what] = gb200[what]
    curves["a100"]["attention_eager"] = curves["a100"]["attention"]
    curves["v100"]["attention"] = curves["v100"]["attention_eager"] = curves["a100"]["attention"] * 0.8
    scale = {"v100": 1, "a100": 1, "h100": 2, "h100-500w": 2, "b200": 3, "gb200": 3, "gb300": 3}
    for name, times in scale.items():
        curves[name]["half_dim"] = params["half_dim"] * times
    return {name: EfficiencyCurve(**values) for name, values in curves.items()}


def curve_of_device(name: str) -> str:
    """The family whose curve a device uses."""
    return str(load_data("devices.json")["devices"][name]["curve"])


def predict(rows: Sequence[Mapping[str, Any]], params: Params) -> np.ndarray:
    """Predicted step seconds."""
    curves = curves_of(params)
    constants = StepConstants(**{f.name: params[f.name] for f in fields(StepConstants)})
    devices = {}
    out = []
    for row in rows:
        key = preset_key(str(row["hardware"]["gpu"])) or "a100"
        if key not in devices:
            devices[key] = replace(device_preset(key), curve=curves[curve_of_device(key)])
        out.append(estimate_row(row, device=devices[key], constants=constants).step_time_s)
    return np.array(out)


def usable(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Primary, complete rows with a step time, and the shape the model covers."""
    return [
        r
        for r in rows
        if r.get("primary", True)
        and r.get("complete")
        and "step_time" in r.get("score_on", ["step_time"])
        and r.get("derived", {}).get("step_time_s")
    ]


def weights_of(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Inverse root of the group's size; rows with assumed parameters count a third."""
    sizes: dict[str, int] = {}
    for r in rows:
        sizes[r["group"]] = sizes.get(r["group"], 0) + 1
    return np.array([(1.0 if r["quality"] == "A" else 0.33) * sizes[r["group"]] ** -0.4 for r in rows])


def robust(residual: np.ndarray, scale: float = 0.06) -> np.ndarray:
    """Weights of a pseudo-Huber loss: one inside `scale`, falling outside."""
    return 1 / np.sqrt(1 + (residual / scale) ** 2)


def jacobian(rows: Sequence[Mapping[str, Any]], params: Params, names: list[str], base: np.ndarray) -> np.ndarray:
    """d log(step) / d log(constant), by forward differences; curves touch only the rows of their devices."""
    J = np.zeros((len(rows), len(names)))
    related = {"h100": ("h100", "h100-500w"), "gb200": ("gb200", "gb300", "b200"), "a100": ("a100", "v100")}
    family = [curve_of_device(preset_key(str(r["hardware"]["gpu"])) or "a100") for r in rows]
    for j, name in enumerate(names):
        head, _, what = name.partition(".")
        picked = [i for i, f in enumerate(family) if not what or f in related.get(head, (head,))]
        moved = predict([rows[i] for i in picked], {**params, name: params[name] * 1.03})
        J[picked, j] = np.log(moved / base[picked]) / np.log(1.03)
    return J


def solve(J: np.ndarray, r: np.ndarray, w: np.ndarray, offset: np.ndarray, ridge: float) -> np.ndarray:
    """The step that minimises sum w rho(r + J d) + ridge |offset + d|^2, reweighted a few times."""
    d = np.zeros(J.shape[1])
    for _ in range(8):
        weight = w * robust(r + J @ d)
        A = J.T @ (J * weight[:, None]) + ridge * np.eye(J.shape[1])
        d = np.linalg.solve(A, -(J.T @ (weight * r)) - ridge * offset)
    return d


def bounded(params: Params) -> Params:
    """Shares stay below one."""
    top = {"matmul": 0.93, "matmul8": 0.88, "matmul4": 0.8, "attention": 0.8, "attention_eager": 0.75}
    out = {}
    for key, value in params.items():
        limit = top.get(key.partition(".")[2], 1.0 if key.endswith("exposed") else np.inf)
        out[key] = float(min(value, limit))
    return out


def fit(rows: Sequence[Mapping[str, Any]], iterations: int = 6, ridge: float = 0.02) -> tuple[Params, np.ndarray]:
    """Fitted constants and the last Jacobian."""
    params, first = dict(PRIOR), PRIOR
    names, measured, w = list(params), np.array([r["derived"]["step_time_s"] for r in rows]), weights_of(rows)
    J = np.zeros((len(rows), len(names)))
    for n in range(iterations):
        base = predict(rows, params)
        r = np.log(base / measured)
        print(
            f"  {n}: median |error| {np.median(np.abs(np.expm1(r))):.2%}, "
            f"loss {np.sum(w * 0.0036 * (1 / robust(r) - 1)):.5f}"
        )
        J = jacobian(rows, params, names, base)
        offset = np.log([params[k] / first[k] for k in names])
        d = np.clip(solve(J, r, w, offset, ridge), -0.35, 0.35)
        params = bounded({k: params[k] * float(np.exp(x)) for k, x in zip(names, d, strict=True)})
    return params, J


def cross_validate(
    rows: Sequence[Mapping[str, Any]], params: Params, J: np.ndarray, key: str = "source", ridge: float = 0.02
) -> dict[str, Any]:
    """Leave one source (or `key="group"`: one family of reports) out: errors of its rows, fitted without them."""
    names, measured, w = list(params), np.array([r["derived"]["step_time_s"] for r in rows]), weights_of(rows)
    r = np.log(predict(rows, params) / measured)
    groups = [row[key] for row in rows]
    result: dict[str, Any] = {"left_out": key, "groups": {}}
    errors = np.zeros(len(rows))
    for group in sorted(set(groups)):
        out = np.array([g == group for g in groups])
        d = solve(J[~out], r[~out], w[~out], np.zeros(len(names)), ridge)
        without = bounded(
            {k: params[k] * float(np.exp(np.clip(x, -0.35, 0.35))) for k, x in zip(names, d, strict=True)}
        )
        held = [row for row, o in zip(rows, out, strict=True) if o]
        errors[out] = predict(held, without) / measured[out] - 1
        e = errors[out]
        result["groups"][group] = {
            "rows": int(out.sum()),
            "mape": float(np.median(np.abs(e))),
            "bias": float(np.median(e)),
        }
    for arch in ("dense", "moe"):
        pick = np.array([r["category"]["arch"] == arch and r["quality"] == "A" for r in rows])
        if pick.any():
            result[arch] = {
                "rows": int(pick.sum()),
                "mape": float(np.median(np.abs(errors[pick]))),
                "bias": float(np.median(errors[pick])),
            }
    return result


def write(params: Params) -> None:
    """Puts the fitted values into the files that the cost model reads."""
    data = json.loads(CURVES.read_text())
    data["note"] = (
        "Fitted by benchmarks/fit_cost_model.py (mi300x and cpu: by hand, from vendors' and own measurements)."
    )
    for name, curve in curves_of(params).items():
        data["curves"][name] = {k: float(f"{v:.4g}") for k, v in asdict(curve).items()}
    CURVES.write_text(json.dumps(data, indent=1) + "\n")
    data = json.loads(CONSTANTS.read_text())
    data["constants"] = {f.name: float(f"{params[f.name]:.4g}") for f in fields(StepConstants)}
    CONSTANTS.write_text(json.dumps(data, indent=1) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", required=True, help="published runs (JSON)")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--write", action="store_true", help="store the fitted constants")
    parser.add_argument("--cv", help="write the cross-validation here")
    args = parser.parse_args(argv)
    rows = usable(json.loads(Path(args.file).read_text()))
    params, J = fit(rows, args.iterations)
    for key, value in params.items():
        print(f"  {key:24s} {value:.4g}")
    if args.write:
        write(params)
    if args.cv:
        results = [cross_validate(rows, params, J, key) for key in ("source", "group")]
        Path(args.cv).write_text(json.dumps(results, indent=1) + "\n")
        for result in results:
            for arch in ("dense", "moe"):
                if arch in result:
                    print(f"  left out by {result['left_out']}, {arch}: {result[arch]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
