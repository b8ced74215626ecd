/* The stop and round protocol of the pipeline, written down a second time and independently of its Python.
 *
 * T targets, D drafters, ROWS rows; a round hands out LIMIT rows per live drafter. Any target and any drafter may die
 * between any two of its steps, TARGET_DEATHS and DRAFTER_DEATHS times in all, and a stop may be asked for at any time.
 * Weights are sets of rows (bit masks). See pipeline.md for the commands that check it and for the state counts.
 *
 * Checked: no deadlock (spin's invalid end states), no endless run (non-progress cycles, -DNP: there is no progress
 * label, so any cycle is an error), and the assertions below: a row is in no live drafter's weights twice; what is
 * committed is exactly what the average holds; a drafter's Stop comes after the last commit, with weights that are what
 * is committed; bounds hold; the run ends CLOSED, STOPPED or FAILED, and FAILED only when it has to.
 */
#ifndef ROWS
#define ROWS 3
#endif
#ifndef LIMIT
#define LIMIT 1
#endif
#ifndef SLOTS
#define SLOTS 3
#endif
#ifndef TARGET_DEATHS
#define TARGET_DEATHS 1
#endif
#ifndef DRAFTER_DEATHS
#define DRAFTER_DEATHS 1
#endif
#define T 2
#define D 2
#define NOBODY 255

#define PLANNED 0
#define LEASED 1
#define CAPTURED 2
#define IN_HAND 3
#define TRAINED 4
#define COMMITTED 5

byte state[ROWS];
byte holder[ROWS];
byte n[6];                 /* rows in each state */
byte slots;                /* charged at the lease, freed when trained, discarded or back to planned */
byte live_targets = T, live_drafters = D, n_done;
bool alive[D];
bool called[D], arrived[D];
bool stopping, closed, failed, closing, averaging, announced_last;
bool sealed = true;        /* the last committed meeting knew that it was the last, or none was needed */
byte leader = NOBODY;
byte round_id;
byte weights[D], average, committed;
byte target_deaths, drafter_deaths;
byte over_count;           /* processes that have ended */

#define over (stopping || n[COMMITTED] == ROWS)
#define handed (n[IN_HAND] + n[TRAINED])
#define nothing_left (n[PLANNED] + n[LEASED] + n[CAPTURED] == 0)
#define limit (LIMIT * live_drafters)
#define must_meet (closing || (handed > 0 && (stopping || handed >= limit)))
#define tail_meets ((handed > 0 && nothing_left) || (over && !sealed))

inline move(r, after, who) {
  n[state[r]]--;
  state[r] = after;
  holder[r] = who;
  n[after]++
}

inline give_up(r) {        /* back to planned; a trained row's slot is free already */
  if
  :: state[r] != TRAINED -> slots--
  :: else
  fi;
  move(r, PLANNED, NOBODY)
}

inline settle() {
  if
  :: !failed && !closed && over && n_done == live_targets -> closed = true
  :: !failed && !closed && !over && n[PLANNED] > 0 && live_targets == 0 -> failed = true
  :: else
  fi
}

inline elect(who) {
  if
  :: leader == NOBODY && (arrived[0] || !alive[0]) && (arrived[1] || !alive[1]) -> leader = who
  :: else
  fi
}

proctype Target(byte me) {
  byte r;
lease:
  if
  :: atomic { !failed && !over && n[PLANNED] > 0 && slots < SLOTS ->
       r = 0;
       do
       :: state[r] != PLANNED -> r++
       :: else -> break
       od;
       move(r, LEASED, me);
       slots++;
       assert(slots <= SLOTS)
     }
  :: atomic { over || failed -> goto report }
  :: atomic { target_deaths > 0 && !failed -> target_deaths--; live_targets--; settle(); goto gone }
  fi;

  if
  :: atomic { failed -> goto gone }
  :: atomic { !failed && stopping -> give_up(r) }
  :: atomic { !failed && !stopping -> move(r, CAPTURED, NOBODY) }
  :: atomic { target_deaths > 0 && !failed -> target_deaths--; live_targets--; give_up(r); settle(); goto gone }
  fi;
  goto lease;

report:
  if
  :: atomic { failed -> goto gone }
  :: atomic { !failed -> n_done++; settle() }
  :: atomic { target_deaths > 0 && !failed -> target_deaths--; live_targets--; settle() }
  fi;
gone:
  over_count++
}

inline die() {
  drafter_deaths--;
  live_drafters--;
  alive[me] = false;
  called[me] = false;
  arrived[me] = false;
  averaging = false;       /* the average under way holds rows that go back: it is repeated */
  if
  :: leader == me -> leader = NOBODY
  :: else
  fi;
  if
  :: arrived[0] -> elect(0)
  :: !arrived[0] && arrived[1] -> elect(1)
  :: else
  fi;
  r = 0;
  do
  :: r < ROWS && (state[r] == IN_HAND || state[r] == TRAINED) && holder[r] == me -> give_up(r); r++
  :: r < ROWS && !((state[r] == IN_HAND || state[r] == TRAINED) && holder[r] == me) -> r++
  :: r == ROWS -> break
  od;
  if
  :: live_drafters == 0 -> failed = true
  :: else
  fi;
  settle()
}

proctype Drafter(byte me) {
  byte r, mine, found;
work:
  if
  :: atomic { failed -> goto gone }
  :: atomic { !failed && must_meet -> closing = true; called[me] = true; mine = round_id; goto meet }
  :: atomic { !failed && !must_meet && n[CAPTURED] > 0 ->
       if                   /* any captured row: the order is free */
       :: state[0] == CAPTURED -> r = 0
       :: state[1] == CAPTURED -> r = 1
       :: ROWS > 2 && state[ROWS - 1] == CAPTURED -> r = ROWS - 1
       fi;
       move(r, IN_HAND, me);
       assert(handed <= limit)
     }
  :: atomic { !failed && !must_meet && n[CAPTURED] == 0 && tail_meets ->
       closing = true; called[me] = true; mine = round_id; goto meet }
  :: atomic { !failed && !must_meet && n[CAPTURED] == 0 && !tail_meets && closed && handed == 0 -> goto stop }
  :: atomic { drafter_deaths > 0 && !failed -> die(); goto gone }
  fi;

  if                        /* the row in hand */
  :: atomic { failed -> goto gone }
  :: atomic { !failed ->
       assert(!(alive[0] && (weights[0] & (1 << r))) && !(alive[1] && (weights[1] & (1 << r))));
       weights[me] = weights[me] | (1 << r);
       move(r, TRAINED, me);
       slots--
     }
  :: atomic { drafter_deaths > 0 && !failed -> die(); goto gone }
  fi;
  goto work;

meet:
  if
  :: atomic { failed -> goto gone }
  :: atomic { !failed -> arrived[me] = true; elect(me) }
  :: atomic { drafter_deaths > 0 && !failed -> die(); goto gone }
  fi;

wait:
  if
  :: atomic { failed -> goto gone }
  :: atomic { !failed && round_id != mine -> weights[me] = average; goto work }
  :: atomic { !failed && round_id == mine && leader == me && !averaging ->
       averaging = true;
       announced_last = stopping || n[COMMITTED] + n[TRAINED] == ROWS
     }
  :: atomic { drafter_deaths > 0 && !failed -> die(); goto gone }
  fi;

  if                        /* the leader's average, out of place */
  :: atomic { failed -> goto gone }
  :: atomic { !failed ->
       found = (alive[0] -> weights[0] : 0) | (alive[1] -> weights[1] : 0) }
  :: atomic { drafter_deaths > 0 && !failed -> die(); goto gone }
  fi;

  if                        /* the commit */
  :: atomic { failed -> goto gone }
  :: atomic { !failed && !averaging -> goto wait }      /* somebody left meanwhile: once more */
  :: atomic { !failed && averaging ->
       average = found;
       r = 0;
       do
       :: r < ROWS && state[r] == TRAINED -> committed = committed | (1 << r); move(r, COMMITTED, NOBODY); r++
       :: r < ROWS && state[r] != TRAINED -> r++
       :: r == ROWS -> break
       od;
       assert(average == committed);
       assert(n[IN_HAND] == 0);
       sealed = announced_last;
       closing = false; averaging = false; leader = NOBODY;
       called[0] = false; called[1] = false; arrived[0] = false; arrived[1] = false;
       round_id++;
       settle()
     }
  :: atomic { drafter_deaths > 0 && !failed -> die(); goto gone }
  fi;
  goto wait;

stop:
  atomic {
    assert(handed == 0);
    assert(stopping || n[COMMITTED] == ROWS);
    assert(sealed);
    assert(weights[me] == committed)
  };
gone:
  over_count++
}

proctype Stopper() {
  byte r;
  if
  :: atomic { !failed && !closed && n[COMMITTED] < ROWS ->
       stopping = true;
       r = 0;
       do
       :: r < ROWS && state[r] == CAPTURED -> give_up(r); r++
       :: r < ROWS && state[r] != CAPTURED -> r++
       :: r == ROWS -> break
       od;
       settle()
     }
  :: true
  fi;
  over_count++
}

init {
  atomic {
    if                      /* without a death too: one that could still happen must not pass for a way out */
    :: target_deaths = 0
    :: target_deaths = TARGET_DEATHS
    fi;
    if
    :: drafter_deaths = 0
    :: drafter_deaths = DRAFTER_DEATHS
    fi;
    n[PLANNED] = ROWS;
    alive[0] = true;
    alive[1] = true;
    run Target(0); run Target(1); run Drafter(0); run Drafter(1); run Stopper()
  };
  over_count == T + D + 1;
  assert(failed || closed);
  assert(!failed || live_drafters == 0 || live_targets == 0);
  assert(failed || (slots == 0 && n[LEASED] + n[CAPTURED] + handed == 0));
  assert(failed || stopping || n[COMMITTED] == ROWS)
}
