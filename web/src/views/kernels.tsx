import { useDocument } from "../document";
import { metered, named, number, present, text } from "../parts/columns";
import { toggle } from "../parts/causes";
import { Empty, Shown } from "../parts/controls";
import { Table } from "../parts/table";
import { useRelated } from "../related";
import { filterOf, isRelated, valueOf } from "../selection";
import { selection } from "../state";

export function Kernels() {
  const kernels = useDocument("kernels");
  const related = useRelated();
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
        return (
          <Table
            name="kernels"
            label="kernels"
            rows={rows}
            columns={present(columns, rows, related, "kernel")}
            sort="-total_ns"
            keep={filterOf(related, selection.value, "kernel") && ((row) => isRelated(related, "kernel", valueOf(String(row.name))))}
            isChosen={(row) => selection.value?.kind === "kernel" && selection.value.value === valueOf(String(row.name))}
            onChoose={(row) => toggle("kernel", valueOf(String(row.name)))}
          />
        );
      }}
    </Shown>
  );
}
