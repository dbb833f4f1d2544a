import { useDocument } from "../document";
import { size } from "../format";
import { LinkedTable, metered, named, number } from "../parts/columns";
import { Shown } from "../parts/controls";

export function Operators() {
  const operators = useDocument("operators");
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
        return <LinkedTable kind="operator" rows={rows} columns={columns} sort={onDevice ? "-device_self_ns" : "-host_self_ns"} />;
      }}
    </Shown>
  );
}
