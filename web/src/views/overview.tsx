import { useDocument } from "../document";

export function Overview() {
  const diagnosis = useDocument("diagnosis");
  if (diagnosis.error) return <p class="error">{diagnosis.error}</p>;
  if (!diagnosis.value) return <p>Reading…</p>;
  return (
    <ol>
      {diagnosis.value.findings.map((finding) => (
        <li>{finding.title}</li>
      ))}
    </ol>
  );
}
