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
  AND coalesce(json_extract(CAST(journal.body AS TEXT), '$.data.dryRun'), 0) = start_request.dry_run
) WHERE state IN ('granted', 'sent');

-- A digest of the code beside a link, keyed with the token, which only the message has. Links of an older version have
-- none: they approve nothing, and their messages are shown again, with new links.
ALTER TABLE invitation ADD COLUMN code TEXT;
UPDATE message SET code = '';                            -- not used any more
UPDATE message SET stale_at = '1970-01-01T00:00:00.000000Z' WHERE posted AND id IN
  (SELECT message FROM message_about JOIN occurrence ON occurrence.id = occurrence WHERE live);

-- What Azure changed about an event is found however much else happened.
CREATE INDEX IF NOT EXISTS journal_of_change ON journal (event_key, position) WHERE kind >= 'event.' AND kind < 'event/';
