import { useDocument } from "../document";
import { size } from "../format";
import { metered, named, number, present } from "../parts/columns";
import { toggle } from "../parts/causes";
import { Shown } from "../parts/controls";
import { Table } from "../parts/table";
import { useRelated } from "../related";
import { filterOf, isRelated, valueOf } from "../selection";
import { selection } from "../state";

export function Operators() {
  const operators = useDocument("operators");
  const related = useRelated();
  return (
    <Shown of={operators} height={640}>
      {(rows) => {
        const onDevice = rows.some((row) => Number(row.device_self_ns) > 0);
        const device = [
          number("device_self_ns", "Device self", 110, { tip: "Time of the device’s work that the operator itself launched" }),
          metered(number("device_self_share", "Share", 84, { tip: "Of the device’s busy time" }), rows),
          number("device_total_ns", "Device total", 110, { spare: 3 }),
        ];
        const columns = [
          named("Operator"),
          number("calls", "Calls", 76, { spare: 2 }),
          number("calls_per_step", "A step", 76, { spare: 6, tip: "Calls in a step" }),
          ...(onDevice ? device : []),
          number("host_self_ns", "Host self", 104, { tip: "Time of the host in the operator, without those it calls" }),
          metered(number("host_self_share", "Share", 84, { spare: 1, tip: "Of the operators’ own time on the host" }), rows),
          number("host_total_ns", "Host total", 104, { spare: 4 }),
          number("bytes_allocated", "Allocated", 104, { spare: 5, show: (row) => (row.bytes_allocated ? size(Number(row.bytes_allocated)) : "") }),
        ];
        return (
          <Table
            name="operators"
            label="operators"
            rows={rows}
            columns={present(columns, rows, related, "operator")}
            sort={onDevice ? "-device_self_ns" : "-host_self_ns"}
            keep={filterOf(related, selection.value, "operator") && ((row) => isRelated(related, "operator", valueOf(String(row.name))))}
            isChosen={(row) => selection.value?.kind === "operator" && selection.value.value === valueOf(String(row.name))}
            onChoose={(row) => toggle("operator", valueOf(String(row.name)))}
          />
        );
      }}
    </Shown>
  );
}
