//! Runs work in parallel. An emulated host that counts instructions keeps one CPU busy, and its
//! results do not depend on other load. So as many run at once as there are CPUs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::Result;

/// Applies `work` to each of `items`, on as many threads as there are CPUs. The results are in the
/// items' order. After an error no new item starts; those that have started are finished, because
/// their results may be worth keeping. Returns the first error in the items' order.
pub fn side_by_side<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let lanes = thread::available_parallelism().map_or(1, usize::from).min(items.len());
    let next = AtomicUsize::new(0);
    let lane = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return done };
            let result = work(item);
            if result.is_err() {
                next.store(items.len(), Ordering::Relaxed);
            }
            done.push((index, result));
        }
    };
    let mut done: Vec<(usize, Result<R>)> = thread::scope(|scope| {
        let lanes: Vec<_> = (0..lanes).map(|_| scope.spawn(lane)).collect();
        lanes
            .into_iter()
            .flat_map(|lane| lane.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn results_come_in_the_order_of_what_they_are_of() {
        let items: Vec<u64> = (0..100).collect();
        let squares = side_by_side(&items, |item| Ok(item * item)).unwrap();
        assert_eq!(squares, items.iter().map(|item| item * item).collect::<Vec<_>>());
        assert!(side_by_side(&[] as &[u64], |_| Ok(())).unwrap().is_empty());
    }

    #[test]
    fn after_an_error_nothing_new_begins() {
        let begun = AtomicUsize::new(0);
        let error = side_by_side(&[7; 1000], |item| -> Result<()> {
            begun.fetch_add(1, Ordering::Relaxed);
            Err(Error::Usage(format!("planted {item}")))
        });
        assert_eq!(error.unwrap_err().to_string(), Error::Usage("planted 7".into()).to_string());
        let lanes = thread::available_parallelism().map_or(1, usize::from);
        assert!(begun.load(Ordering::Relaxed) <= lanes, "a lane goes on after its error");
    }
}
