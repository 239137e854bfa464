//! Passes over simulated guests and links.

use super::*;

const PAGE: f64 = PAGE_SIZE as f64;

/// Simulates a guest of `pages` pages that writes `rate` pages per second over `hot` of them. The
/// link sends `link` bytes per second. Returns the passes until the decision, the decision, and the
/// pages left for the final pass.
fn simulate(plan: &mut Plan, pages: u64, rate: f64, hot: u64, link: f64) -> (u32, Decision, u64) {
    let (mut now, mut owed, mut passes) = (0.0, pages, 0);
    loop {
        passes += 1;
        let took = (owed as f64 * PAGE / link).max(1e-4);
        now += took;
        let dirty = ((rate * took) as u64).min(hot);
        let measured = Measured {
            pages: owed,
            bytes: (owed as f64 * PAGE) as u64,
            took: Duration::from_secs_f64(took),
            dirty,
        };
        owed = dirty;
        match plan.pass_ended(measured, Duration::from_secs_f64(now)) {
            Decision::Again if passes < 1000 => {}
            decision => return (passes, decision, owed),
        }
    }
}

const LINK: f64 = 100.0 * 1024.0 * 1024.0;
const LIMIT: Duration = Duration::from_millis(300);

#[test]
fn an_idle_guest_takes_one_pass() {
    let mut plan = Plan::new(LIMIT, None, None);
    assert_eq!(simulate(&mut plan, 65_536, 0.0, 0, LINK), (1, Decision::Converged, 0));
}

#[test]
fn the_limit_is_a_cap_and_not_an_aim() {
    // Half of the link's bandwidth: each pass halves the rest, so passes pay until little is left.
    let mut plan = Plan::new(LIMIT, None, None);
    let (passes, decision, left) = simulate(&mut plan, 65_536, LINK / PAGE / 2.0, 65_536, LINK);
    assert_eq!(decision, Decision::Converged);
    let downtime = left as f64 * PAGE / LINK;
    assert!(downtime < LIMIT.as_secs_f64() / 10.0 && passes > 5, "{passes} passes, {downtime} s");
}

#[test]
fn a_hot_set_that_fits_ends_when_passes_no_longer_pay() {
    // 1,000 hot pages, written repeatedly: 40 ms.
    let mut plan = Plan::new(LIMIT, None, None);
    let (passes, decision, left) = simulate(&mut plan, 65_536, 1e6, 1000, LINK);
    assert_eq!((decision, left), (Decision::Converged, 1000));
    assert!(passes <= 3, "{passes}");
}

#[test]
fn a_guest_faster_than_its_link_is_given_up_or_forced_in_the_end() {
    let timeout = Duration::from_secs(30);
    let rate = 2.0 * LINK / PAGE;
    let mut plan = Plan::new(LIMIT, Some((timeout, Then::Cancel)), None);
    let (_, decision, _) = simulate(&mut plan, 65_536, rate, 65_536, LINK);
    let Decision::GiveUp(why) = decision else { panic!("{decision:?}") };
    assert!(why.contains(": 100.0 MiB/s of pages") && why.contains("takes 100.0 MiB/s"), "{why}");
    assert!(plan.is_over(timeout).is_some() && plan.is_over(timeout / 2).is_none());
    let mut plan = Plan::new(LIMIT, Some((timeout, Then::Force)), None);
    let (_, decision, left) = simulate(&mut plan, 65_536, rate, 65_536, LINK);
    assert_eq!((decision, left), (Decision::Converged, 65_536));
    // If the final pass were given up again, the guest would never move.
    assert_eq!((plan.most_downtime(timeout), plan.most_downtime(timeout / 2)), (None, Some(MIN_OVERRUN)));
    // Never before the timeout, and endless passes without one.
    let mut plan = Plan::new(LIMIT, None, None);
    assert_eq!(simulate(&mut plan, 65_536, rate, 65_536, LINK).1, Decision::Again);
}

/// The same for a guest that the plan throttles. Returns the decision, the final throttling, and
/// the time it took.
fn simulate_throttled(plan: &mut Plan, pages: u64, rate: f64) -> (Decision, u32, Duration) {
    let (mut now, mut owed) = (0.0, pages);
    for _ in 0..1000 {
        let took = (owed as f64 * PAGE / LINK).max(1e-4);
        now += took;
        let rate = rate * f64::from(100 - plan.taken()) / 100.0;
        let dirty = ((rate * took) as u64).min(pages);
        let bytes = (owed as f64 * PAGE) as u64;
        let measured = Measured { pages: owed, bytes, took: Duration::from_secs_f64(took), dirty };
        owed = dirty;
        match plan.pass_ended(measured, Duration::from_secs_f64(now)) {
            Decision::Again => {}
            decision => return (decision, plan.taken(), Duration::from_secs_f64(now)),
        }
    }
    (Decision::Again, plan.taken(), Duration::from_secs_f64(now))
}

#[test]
fn a_guest_that_is_slowed_down_converges() {
    let twice = 2.1 * LINK / PAGE;
    let plan = |throttling| Plan::new(LIMIT, None, None).throttling(throttling);
    // 20 %, 30 %, …: at 60 % a pass leaves 84 %, at 70 % it pays.
    let (decision, taken, _) = simulate_throttled(&mut plan(Throttling::Steps), 65_536, twice);
    assert_eq!((decision, taken), (Decision::Converged, 70));
    // A guest that writes 2.1 times the link's bandwidth keeps a little less than a quarter of its
    // time.
    let (decision, taken, _) = simulate_throttled(&mut plan(Throttling::DirtyLimit), 65_536, twice);
    assert_eq!(decision, Decision::Converged);
    assert!((50..=77).contains(&taken), "{taken} %");
    // A guest slower than the link keeps its time. So does a guest without throttling.
    let half = LINK / PAGE / 2.0;
    for throttling in [Throttling::Steps, Throttling::DirtyLimit] {
        assert_eq!(simulate_throttled(&mut plan(throttling), 65_536, half).1, 0);
    }
    let (decision, taken, _) = simulate_throttled(&mut plan(Throttling::Off), 65_536, twice);
    assert_eq!((decision, taken), (Decision::Again, 0));
    // A guest keeps some of its time however fast it writes.
    let (_, taken, _) = simulate_throttled(&mut plan(Throttling::Steps), 65_536, 1000.0 * twice);
    assert_eq!(taken, MAX_TAKEN);
}

#[test]
fn who_wants_little_is_not_limited_and_leaves_the_rest_to_others() {
    assert_eq!(limit_of_each(&[], 10.0), f64::INFINITY);
    assert_eq!(limit_of_each(&[3.0, 4.0, 3.0], 10.0), f64::INFINITY);
    assert_eq!(limit_of_each(&[0.0, 100.0], 10.0), 10.0);
    assert_eq!(limit_of_each(&[2.0, 100.0, 50.0], 10.0), 4.0);
    assert_eq!(limit_of_each(&[100.0, 100.0], 10.0), 5.0);
}

#[test]
fn only_vcpus_above_their_share_are_slowed_down() {
    let mut plan = Plan::new(LIMIT, None, None).throttling(Throttling::DirtyLimit);
    let second = Duration::from_secs(1);
    // The link sends 100 MiB/s, and the vCPUs write 200: 160, 40, next to nothing, and nothing.
    let pages = (2.0 * LINK / PAGE) as u64;
    let measured = |dirty| Measured { pages, bytes: LINK as u64, took: second, dirty };
    plan.wrote(vec![pages * 8 / 10, pages * 2 / 10, 1, 0]);
    assert_eq!(plan.pass_ended(measured(pages), second), Decision::Again);
    // Of 50 MiB/s each may have 25.
    let taken: Vec<u32> = (0..4).map(|vcpu| plan.taken_from(vcpu)).collect();
    assert!((84..=85).contains(&taken[0]) && (37..=38).contains(&taken[1]), "{taken:?}");
    assert_eq!((&taken[2..], plan.taken()), (&[0, 0][..], taken[0]));
    // A pass without counts per vCPU does not reduce the throttling of any.
    plan.wrote(vec![0; 4]);
    plan.pass_ended(measured(pages), 2 * second);
    assert!((0..4).all(|vcpu| plan.taken_from(vcpu) >= taken[vcpu]));
}

#[test]
fn what_comes_is_what_was_estimated() {
    let near = |one: Duration, other: Duration| {
        let (one, other) = (one.as_secs_f64(), other.as_secs_f64());
        (one - other).abs() <= 0.1 * other.max(0.05)
    };
    for share in [0.0, 0.1, 0.5, 0.7] {
        let mut plan = Plan::new(LIMIT, None, None);
        assert_eq!(plan.estimate(), None);
        let (decision, _, took) = simulate_throttled(&mut plan, 65_536, share * LINK / PAGE);
        assert_eq!(decision, Decision::Converged);
        let estimate = plan.estimate().unwrap();
        assert!(
            near(estimate.total, took + plan.expected_downtime().unwrap()),
            "{share}: {estimate:?}, {took:?}"
        );
        assert!(near(estimate.downtime, plan.expected_downtime().unwrap()), "{share}: {estimate:?}");
    }
    // No end is in sight unless the final pass is forced.
    let mut plan = Plan::new(LIMIT, None, None);
    simulate_throttled(&mut plan, 65_536, 2.0 * LINK / PAGE);
    assert_eq!(plan.estimate(), None);
    let timeout = Duration::from_secs(30);
    let mut plan = Plan::new(LIMIT, Some((timeout, Then::Force)), None);
    let (decision, _, took) = simulate_throttled(&mut plan, 65_536, 2.0 * LINK / PAGE);
    assert_eq!(decision, Decision::Converged);
    let estimate = plan.estimate().unwrap();
    assert!(estimate.total >= timeout && took >= timeout, "{estimate:?}, {took:?}");
}

#[test]
fn a_limit_that_no_guest_can_keep_makes_no_pass_of_nothing() {
    let (limit, took) = (Duration::from_millis(1), Duration::from_micros(200));
    let measured = |pages, dirty| Measured { pages, bytes: pages * PAGE_SIZE, took, dirty };
    let mut plan = Plan::new(limit, None, None);
    plan.pass_ended(measured(65_536, 10), took);
    assert_eq!(plan.pass_ended(measured(10, 0), took), Decision::Converged);
    // Each pass leaves more than a frame, and too much for the limit.
    let mut plan = Plan::new(limit, None, None);
    let (mut now, mut passes) = (Duration::ZERO, 0);
    while now < Duration::from_secs(2) {
        if let Some(wait) = plan.holds_back(now) {
            now += wait;
            continue;
        }
        now += took;
        passes += 1;
        assert_eq!(plan.pass_ended(measured(200, 200), now), Decision::Again);
    }
    assert!(passes <= 41, "{passes} passes in {now:?}");
}

#[test]
fn a_cap_on_bandwidth_is_kept_and_not_saved_up() {
    let cap = 100 << 20;
    let mut plan = Plan::new(LIMIT, None, Some(cap));
    let (mut now, mut sent) = (Duration::from_secs(5), 0);
    while sent < cap {
        match plan.holds_back(now) {
            Some(wait) => now += wait,
            None => {
                plan.sent(256 << 10, now);
                sent += 256 << 10;
            }
        }
    }
    let took = (now - Duration::from_secs(5)).as_secs_f64();
    assert!((0.95..1.05).contains(&took), "{cap} bytes took {took} s");
}

/// A target that is not ready in time: the guest runs for longer after each attempt than it was
/// paused, and stays in the end. A timeout ends the rest and decides instead.
#[test]
fn a_final_pass_that_takes_too_long_again_and_again_is_not_tried_forever() {
    let second = Duration::from_secs(1);
    let forced = Some((100 * second, Then::Force));
    for (timeout, ends) in [(None, true), (Some((3600 * second, Then::Cancel)), true), (forced, false)] {
        let mut plan = Plan::new(LIMIT, timeout, None);
        let (mut now, mut ended) = (Duration::ZERO, None);
        for attempt in 1..=2 * MAX_OVERRUNS {
            now += second;
            if let Err(why) = plan.overran(second, now) {
                ended = Some((attempt, why));
                break;
            }
            let over = timeout.is_some_and(|(timeout, _)| now >= timeout);
            assert_eq!(plan.holds_back(now + second).is_some(), !over, "attempt {attempt}");
            while plan.holds_back(now).is_some() {
                now += LOOK;
            }
        }
        assert_eq!(ended.is_some(), ends, "{timeout:?}: {ended:?}");
        assert!(ended.is_none_or(|(attempt, why)| attempt == MAX_OVERRUNS && why.contains("1s")));
    }
}
