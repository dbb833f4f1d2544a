import { useDocument } from "../document";
import { LinkedTable, metered, named, number, text } from "../parts/columns";
import { Empty, Shown } from "../parts/controls";

export function Kernels() {
  const kernels = useDocument("kernels");
  return (
    <Shown of={kernels} height={640}>
      {(rows) => {
        if (!rows.length) return <Empty title="No device was recorded.">Record with the device’s activities, such as ProfilerActivity.CUDA, to see its kernels.</Empty>;
        const columns = [
          named("Kernel or copy"),
          number("calls", "Calls", 76, { spare: 2 }),
          number("calls_per_step", "A step", 76, { spare: 1, tip: "Calls in a step" }),
          number("total_ns", "Total", 96),
          metered(number("share", "Share", 84, { tip: "Of the device’s busy time" }), rows),
          number("mean_ns", "Mean", 92, { spare: 1 }),
          number("shortest_ns", "Shortest", 92, { spare: 5 }),
          number("longest_ns", "Longest", 92, { spare: 5 }),
          number("launch_delay_ns", "Delay", 92, { spare: 4, tip: "Median time from the launch on the host to the start on the device" }),
          text("precision", "Precision", { spare: 3, width: 84 }),
          text("tensor_cores", "Tensor cores", { spare: 6, width: 104 }),
        ];
        return <LinkedTable kind="kernel" rows={rows} columns={columns} sort="-total_ns" />;
      }}
    </Shown>
  );
}
