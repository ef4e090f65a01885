-- Version 4: the events that ended a while ago are found however many ended before.

CREATE INDEX IF NOT EXISTS occurrence_ended ON occurrence (last_changed) WHERE NOT live;
