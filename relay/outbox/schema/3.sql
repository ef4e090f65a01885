-- Version 3: where the journal holds each decision and each grant, and an index of changes.

-- The journal is the authority: a vote or an open grant counts only with the row that it came from.
ALTER TABLE decision ADD COLUMN position INTEGER;        -- of its approval.recorded
UPDATE decision SET position = (
  SELECT journal.position FROM journal JOIN occurrence ON journal.event_key = occurrence.key
  WHERE occurrence.id = decision.occurrence AND journal.kind = 'approval.recorded'
  AND json_extract(CAST(journal.body AS TEXT), '$.id') = decision.told
) WHERE counts;

ALTER TABLE start_request ADD COLUMN position INTEGER;   -- of its approval.granted
UPDATE start_request SET position = (
  SELECT max(journal.position) FROM journal JOIN occurrence ON journal.event_key = occurrence.key
  WHERE occurrence.id = start_request.occurrence AND journal.kind = 'approval.granted'
  AND json_extract(CAST(journal.body AS TEXT), '$.data.approvalId') = start_request.approval_id
  AND json_extract(CAST(journal.body AS TEXT), '$.data.revision') = start_request.revision
) WHERE state IN ('granted', 'sent');

-- What Azure changed about an event is found however much else happened.
CREATE INDEX IF NOT EXISTS journal_of_change ON journal (event_key, position) WHERE kind >= 'event.' AND kind < 'event/';
